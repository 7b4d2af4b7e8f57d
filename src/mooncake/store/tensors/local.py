"""Tensors in this process's memory: as bytes with a header, and as torch's.

A *local* tensor is cut and joined as bytes, so that torch is only imported where one of its tensors is taken or made.
"""

import ctypes
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from mooncake.errors import TransferError
from mooncake.store.tensors.header import DTYPES, ITEM_SIZES, MOST_DIMENSIONS, SIZE, Header, unpack

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]


class Local(NamedTuple):
    """A header and its data: `address` is valid while `owner` lives."""

    header: Header
    address: int
    owner: Any
    on_device: bool = False

    @property
    def data(self) -> "Bytes":
        """As bytes, without a copy."""
        import numpy as np

        if not self.header.data_size:
            return np.empty(0, np.uint8)
        memory: Any = (ctypes.c_uint8 * self.header.data_size).from_address(self.address)
        return np.frombuffer(memory, np.uint8)


def from_torch(tensor: Any) -> Local | None:
    """A torch tensor, made contiguous; None for anything else, and for types or shapes that cannot be stored."""
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is None or not isinstance(tensor, torch.Tensor) or tensor.dim() > MOST_DIMENSIONS:
        return None
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout != torch.strided:
        return None
    tensor = tensor.detach().contiguous()
    shape = tuple(tensor.shape)
    return Local(Header(DTYPES.index(name), shape, shape), tensor.data_ptr(), tensor, tensor.device.type != "cpu")


def from_bytes(raw: bytes) -> Local | None:
    """A header and data; None if they are no tensor."""
    import numpy as np

    header = unpack(raw, len(raw))
    if header is None:
        return None
    array = np.frombuffer(raw, np.uint8)
    return Local(header, int(array.ctypes.data) + SIZE, array)


def header_at(address: int, size: int) -> Header | None:
    """What the tensor of `size` bytes at an address is; None if there is none."""
    from mooncake.transfer.process_memory import read_at

    if address <= 0 or size < SIZE:
        return None
    try:
        return unpack(read_at(address, SIZE), size)
    except TransferError:
        return None


def from_address(address: int, size: int) -> Local | None:
    """A copy of the tensor of `size` bytes, header and data, at an address; None if there is none."""
    from mooncake.transfer.process_memory import read_at

    if header_at(address, size) is None:
        return None
    try:
        return from_bytes(read_at(address, size))
    except TransferError:
        return None


def from_handle(handle: Any) -> Local | None:
    """A value that was read, or None."""
    if handle is None:
        return None
    header = unpack(memoryview(handle)[:SIZE], len(handle))
    return None if header is None else Local(header, handle.ptr() + SIZE, handle)


def to_torch(local: Local | None) -> Any:
    """As a torch tensor of the same memory."""
    if local is None:
        return None
    return torch_at(local.header, local.address, local.owner)


def torch_at(header: Header, address: int, owner: Any = None) -> Any:
    """The tensor whose data lie at an address; it keeps `owner` alive."""
    import torch

    dtype = getattr(torch, DTYPES[header.dtype])
    if not header.data_size:
        return torch.empty(header.shape, dtype=dtype)
    memory: Any = (ctypes.c_uint8 * header.data_size).from_address(address)
    memory.owner = owner
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(header.shape)


def write_to(local: Local, address: int, size: int) -> bool:
    """Copy header and data to an address with room for `size` bytes; whether that could be."""
    from mooncake.transfer.process_memory import write_at

    raw = local.header.pack() + local.data.tobytes()
    if address <= 0 or len(raw) > size:
        return False
    try:
        write_at(address, raw)
    except TransferError:
        return False
    return True


def cut(local: Local, dim: int, rank: int, count: int) -> Local | None:
    """One of `count` equal parts along a dimension; None if there is no such part."""
    shape = local.header.shape
    if not (0 <= dim < len(shape) and 0 <= rank < count) or shape[dim] % count:
        return None
    extent = shape[dim] // count
    return take(local, dim, rank * extent, extent)


def take(local: Local, dim: int, start: int, extent: int) -> Local:
    """Steps [start, start + extent) of a dimension, as a whole of their own."""
    import numpy as np

    shape = local.header.shape
    part = (*shape[:dim], extent, *shape[dim + 1 :])
    header = Header(local.header.dtype, part, part)
    if local.on_device:
        tensor = local.owner.narrow(dim, start, extent).contiguous()
        return Local(header, tensor.data_ptr(), tensor, True)
    step = _inner(local.header, dim)
    rows = _rows(local, dim)[:, start * step : (start + extent) * step]
    return _local(header, np.ascontiguousarray(rows))


def join(parts: list[Local], dim: int) -> Local | None:
    """Parts side by side along a dimension; None if they do not fit one another."""
    import numpy as np

    first = parts[0].header
    if not 0 <= dim < len(first.shape):
        return None
    around = (*first.shape[:dim], *first.shape[dim + 1 :])
    for part in parts:
        shape = part.header.shape
        if part.header.dtype != first.dtype or (*shape[:dim], *shape[dim + 1 :]) != around:
            return None
    extent = sum(part.header.shape[dim] for part in parts)
    whole = (*first.shape[:dim], extent, *first.shape[dim + 1 :])
    return _local(Header(first.dtype, whole, whole), np.concatenate([_rows(part, dim) for part in parts], axis=1))


def _local(header: Header, array: "Bytes") -> Local:
    return Local(header, int(array.ctypes.data), array)


def _inner(header: Header, dim: int) -> int:
    """Bytes of one step along a dimension."""
    size = ITEM_SIZES[header.dtype]
    for extent in header.shape[dim + 1 :]:
        size *= extent
    return size


def _rows(local: Local, dim: int) -> "Bytes":
    """The data as rows, in each of which a dimension's steps follow one another."""
    outer = 1
    for extent in local.header.shape[:dim]:
        outer *= extent
    return local.data.reshape(outer, local.header.shape[dim] * _inner(local.header, dim))
