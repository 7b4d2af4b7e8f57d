"""Fields read from a store: wholly or some rows, into fresh memory or into the caller's."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake.errors import ErrorCode
from mooncake.structured import values
from mooncake.structured.fields import OFFSET, Field, array_over, rows_from
from mooncake.structured.parts import RawDestination, TensorObjectBuffer

Indexes = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class ReadError(RuntimeError):
    """A field is not there any more, or could not be read."""


def read(store: Any, fields: Sequence[Field], rows: Indexes | None, destinations: Mapping[str, Any]) -> dict[str, Any]:
    """The fields by their names.  Those that are read wholly cross in one batch.  Raises ReadError; ValueError for a
    destination that does not fit."""
    results: dict[str, Any] = {}
    whole: list[tuple[Field, int]] = []  # and to which address
    for wanted in fields:
        destination = destinations.get(wanted.name)
        if wanted.kind == "rows":
            if destination is not None:
                raise ValueError(f"field {wanted.name!r} is encoded: it cannot be read into a buffer")
            results[wanted.name] = _encoded(store, wanted, rows)
        elif isinstance(destination, TensorObjectBuffer):
            results[wanted.name] = tensor_object(wanted, rows, destination)
            whole.append((wanted, destination.ptr))
        elif destination is None and (rows is None or wanted.rows is None):
            raw = np.empty(wanted.size, np.uint8)
            results[wanted.name] = array_over(wanted, raw[wanted.data_at :], wanted.shape)
            whole.append((wanted, raw.ctypes.data))
        else:
            results[wanted.name] = _data(store, wanted, rows, destination)
    present = [(wanted, address) for wanted, address in whole if wanted.size]
    if present:
        keys, sizes = [wanted.key for wanted, _ in present], [wanted.size for wanted, _ in present]
        codes = store.batch_get_into(keys, [address for _, address in present], sizes)
        for (wanted, _), code in zip(present, codes, strict=True):
            _check(wanted, code, wanted.size)
    return results


def _check(wanted: Field, code: int, size: int) -> None:
    if code != size:
        raise ReadError(f"field {wanted.name!r} cannot be read from key {wanted.key!r}: {shortfall(code, size)}")


def shortfall(code: int, size: int) -> str:
    """What an answer of other than `size` bytes means."""
    return named(code) if code < 0 else f"it has {code} bytes, not {size}"


def named(code: int) -> str:
    """A code of the store with its name."""
    return f"{ErrorCode(code).name} ({code})" if code in ErrorCode._value2member_map_ else str(code)


def tensor_object(wanted: Field, rows: Indexes | None, destination: TensorObjectBuffer) -> Any:
    """The tensor over a whole tensor object that will be there.  Raises ValueError for what is none or does not fit."""
    if wanted.kind != "object" or rows is not None:
        which = "some rows of it" if rows is not None else "it is no tensor object, and"
        raise ValueError(f"field {wanted.name!r}: {which} cannot be read into a tensor_object_buffer")
    return array_over(wanted, _memory(wanted, wanted.size, destination)[wanted.data_at :], wanted.shape)


def _memory(wanted: Field, size: int, destination: TensorObjectBuffer | RawDestination) -> Bytes:
    if destination.size < size:
        raise ValueError(f"field {wanted.name!r} has {size} bytes, but its destination {destination.size}")
    memory: Any = (ctypes.c_ubyte * size).from_address(destination.ptr)
    memory.owner = destination.owner  # arrays over it keep it
    return np.frombuffer(memory, np.uint8)


def _data(store: Any, wanted: Field, rows: Indexes | None, destination: Any) -> Any:
    """An array's or tensor object's data, without what may stand before them."""
    plan = planned(wanted, rows, destination)
    if plan.sizes:
        _read_ranges(store, wanted, plan.address, plan.sources, plan.sizes, plan.registered)
    return plan.result


@dataclass(frozen=True)
class Plan:
    """Ranges of a value (where they begin in it, and their bytes) that go to an address one after another, and the
    array or tensor over what will be there.  `registered`: the caller has registered that memory."""

    sources: list[int]
    sizes: list[int]
    address: int
    result: Any
    registered: bool


def planned(wanted: Field, rows: Indexes | None, destination: Any) -> Plan:
    """How the data of an array or tensor object are read: wholly or some rows, into fresh memory or a destination.
    Raises ValueError for a destination that does not fit."""
    if rows is None or wanted.rows is None:
        shape, size = wanted.shape, wanted.data_size
        sources, sizes = [wanted.data_at], [size]
    else:
        shape, size = [len(rows), *wanted.shape[1:]], len(rows) * wanted.row_size
        starts, lengths = _runs(rows)
        sources = (starts * wanted.row_size + wanted.data_at).tolist()
        sizes = (lengths * wanted.row_size).tolist()
    address, result = _room(wanted, size, shape, destination)
    registered = isinstance(destination, RawDestination) and destination.pre_registered
    return Plan(sources if size else [], sizes if size else [], address, result, registered)


def _room(wanted: Field, size: int, shape: list[int], destination: Any) -> tuple[int, Any]:
    """Where data go, and the array or tensor over them."""
    if destination is None or isinstance(destination, RawDestination):
        raw = np.empty(size, np.uint8) if destination is None else _memory(wanted, size, destination)
        return raw.ctypes.data, array_over(wanted, raw, shape)
    if values.is_tensor(destination):
        fits = destination.is_contiguous() and values.dtype_of(destination) == wanted.dtype
        address, container = destination.data_ptr(), "torch"
    elif isinstance(destination, np.ndarray):
        fits = destination.flags.c_contiguous and destination.flags.writeable and destination.dtype.str == wanted.dtype
        address, container = destination.ctypes.data, "numpy"
    else:
        raise ValueError(f"field {wanted.name!r}: a {type(destination).__name__} is no destination")
    if not fits or container != wanted.container or list(destination.shape) != shape:
        wish = f"contiguous destination of {wanted.container}, type {wanted.dtype}, shape {shape}"
        raise ValueError(f"field {wanted.name!r} needs a {wish}")
    return address, destination


def _runs(rows: Indexes) -> tuple[Indexes, Indexes]:
    """Rows that follow one another: first ones, and how many."""
    firsts = np.concatenate(([0], np.flatnonzero(np.diff(rows) != 1) + 1))
    return rows[firsts] if len(rows) else rows, np.diff(np.concatenate((firsts, [len(rows)])))


def _read_ranges(
    store: Any, wanted: Field, address: int, sources: list[int], sizes: list[int], registered: bool = False
) -> None:
    """Ranges of a value, one after another to an address."""
    ends = np.cumsum(sizes).tolist()
    (codes,) = gather(store, address, ends[-1], [Ranges(wanted.key, [0, *ends[:-1]], sources, sizes)], registered)
    for code, size in zip(codes, sizes, strict=True):
        _check(wanted, code, size)


@dataclass(frozen=True)
class Ranges:
    """Ranges of the value of `key`: where each begins in it (`sources`) and in the memory that it goes to (`targets`),
    and its bytes."""

    key: str
    targets: list[int]
    sources: list[int]
    sizes: list[int]


def gather(store: Any, address: int, size: int, parts: Sequence[Ranges], registered: bool) -> list[list[int]]:
    """Read the ranges into `size` bytes at an address, which are registered meanwhile unless they are.  Bytes or a code
    for each range."""
    ours = not registered and store.register_buffer(address, size) == 0
    keys, targets = [one.key for one in parts], [one.targets for one in parts]
    sources, sizes = [one.sources for one in parts], [one.sizes for one in parts]
    try:
        (codes,) = store.get_into_ranges([address], [keys], [targets], [sources], [sizes])
    finally:
        if ours:
            store.unregister_buffer(address)
    result: list[list[int]] = codes
    return result


def _encoded(store: Any, wanted: Field, rows: Indexes | None) -> Any:
    count = wanted.shape[0]
    table_size = (count + 1) * OFFSET
    if rows is None:
        everything = np.empty(wanted.size, np.uint8)
        (code,) = store.batch_get_into([wanted.key], [everything.ctypes.data], [wanted.size])
        _check(wanted, code, wanted.size)
        offsets = everything[:table_size].view("<u8").astype(np.int64)
        return rows_from(wanted, _cut(everything[table_size:], offsets[:-1], offsets[1:]))
    table = np.empty(table_size, np.uint8)
    _read_ranges(store, wanted, table.ctypes.data, [0], [table_size])
    offsets = table.view("<u8").astype(np.int64)
    first, last = offsets[rows], offsets[rows + 1]
    raw = np.empty(int((last - first).sum()), np.uint8)
    if len(rows):
        _read_ranges(store, wanted, raw.ctypes.data, (first + table_size).tolist(), (last - first).tolist())
    ends = np.cumsum(last - first)
    return rows_from(wanted, _cut(raw, ends - (last - first), ends))


def _cut(raw: Bytes, starts: Indexes, ends: Indexes) -> list[memoryview]:
    view = raw.data
    return [view[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
