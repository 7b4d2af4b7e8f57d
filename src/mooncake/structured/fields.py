"""Fields as values of the pool.

array    an array's bytes: rows lie one after another
object   a tensor object, which get_tensor of the store reads too: a header of 304 bytes, and the data as above
rows     u64 offsets of the rows, one more than there are, counted from their end; then every row, see values.py
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake.store.tensors import header
from mooncake.structured import values
from mooncake.structured.parts import BundleTransferPolicy, TensorObjectBuffer

OFFSET = 8  # bytes


@dataclass(frozen=True)
class Field:
    """What a manifest says about one field.  `size`: bytes of its value; `container`: what callers get."""

    name: str
    section: str  # batch or non_tensor_batch
    kind: str  # array, object or rows
    container: str  # numpy, torch, list or objects (a numpy array of objects)
    dtype: str
    shape: list[int]
    size: int
    key: str

    @property
    def rows(self) -> int | None:
        """None: it is a scalar, and belongs to the batch as a whole."""
        return self.shape[0] if self.shape else None

    @property
    def data_at(self) -> int:
        """Where the data of an array or tensor object begin."""
        return header.SIZE if self.kind == "object" else 0

    @property
    def data_size(self) -> int:
        """Bytes of these data."""
        return self.size - self.data_at

    @property
    def row_size(self) -> int:
        """Bytes of one row of them."""
        return self.data_size // max(1, self.shape[0])


@dataclass
class Source:
    """A field, and the pieces of memory that its value is put together from."""

    described: Field
    addresses: list[int]
    sizes: list[int]
    owners: list[Any]


def source(name: str, section: str, value: Any, key: str, policy: BundleTransferPolicy) -> Source:
    """Raises TypeError or ValueError, naming the field, for what cannot be stored that way."""
    if isinstance(value, TensorObjectBuffer):
        return _object(name, section, value, key)
    if values.is_tensor(value):
        if policy.copy_mode == "zero_copy":
            raise ValueError(f"field {name!r} is a tensor: zero_copy takes tensors as tensor_object_buffer only")
        return _tensor(name, section, value, key)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        array = np.ascontiguousarray(value).reshape(value.shape)  # the former makes a row of a scalar
        described = Field(name, section, "array", "numpy", array.dtype.str, list(array.shape), array.nbytes, key)
        return Source(described, [array.ctypes.data], [array.nbytes], [array])
    return _rows(name, section, value, key, policy)


def _object(name: str, section: str, value: TensorObjectBuffer, key: str) -> Source:
    raw = ctypes.string_at(value.ptr, min(value.size, header.SIZE))
    found = header.unpack(raw, value.size)
    if found is None:
        raise ValueError(f"field {name!r}: there is no tensor object at the address of its tensor_object_buffer")
    shape, size = list(found.shape), header.SIZE + found.data_size
    if size > value.size:
        raise ValueError(f"field {name!r}: its tensor object has {size} bytes, but its buffer {value.size}")
    if value.batch_size is not None and shape[:1] != [value.batch_size]:
        raise ValueError(f"field {name!r} has the shape {shape}, which are not {value.batch_size} rows")
    described = Field(name, section, "object", "torch", header.DTYPES[found.dtype], shape, size, key)
    return Source(described, [value.ptr], [size], [value.owner])


def _tensor(name: str, section: str, value: Any, key: str) -> Source:
    dtype, shape, raw = values.dtype_of(value), list(value.shape), values.tensor_bytes(value)
    size = raw.numel()
    if not size or not shape or len(shape) > header.MOST_DIMENSIONS or dtype not in header.DTYPES:
        described = Field(name, section, "array", "torch", dtype, shape, size, key)
        return Source(described, [raw.data_ptr()], [size], [raw])
    packed = header.Header(header.DTYPES.index(dtype), tuple(shape), tuple(shape)).pack()
    first = np.frombuffer(packed, np.uint8)
    described = Field(name, section, "object", "torch", dtype, shape, header.SIZE + size, key)
    return Source(described, [first.ctypes.data, raw.data_ptr()], [header.SIZE, size], [first, raw])


def _rows(name: str, section: str, value: Any, key: str, policy: BundleTransferPolicy) -> Source:
    if isinstance(value, np.ndarray) and value.ndim == 1:
        container = "objects"
    elif isinstance(value, list | tuple):
        container = "list"
    else:
        shown = f"an array of objects of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(f"field {name!r} is {shown}: expected a tensor, an array, or a list with one item for each row")
    if policy.copy_mode == "zero_copy":
        raise ValueError(f"field {name!r} must be encoded, which zero_copy forbids: use copy_mode auto")
    encoded = [values.encode(item, f"row {number} of field {name!r}") for number, item in enumerate(value)]
    offsets = np.zeros(len(encoded) + 1, "<u8")
    np.cumsum([len(row) for row in encoded], out=offsets[1:])
    raw = np.frombuffer(b"".join([offsets.tobytes(), *encoded]), np.uint8)
    described = Field(name, section, "rows", container, "", [len(encoded)], raw.nbytes, key)
    return Source(described, [raw.ctypes.data], [raw.nbytes], [raw])


def array_over(wanted: Field, raw: npt.NDArray[np.uint8], shape: list[int]) -> Any:
    """The array or tensor of that shape whose bytes `raw` are."""
    if wanted.container == "torch":
        return values.tensor_from(raw, wanted.dtype, shape)
    dtype = np.dtype(wanted.dtype)
    return raw.view(dtype).reshape(shape) if raw.size else np.empty(shape, dtype)


def rows_from(wanted: Field, encoded: list[memoryview]) -> Any:
    """The rows in the container that they came in."""
    restored = [values.decode(row) for row in encoded]
    if wanted.container == "list":
        return restored
    objects = np.empty(len(restored), object)
    for number, row in enumerate(restored):  # an assignment of the whole would look into lists
        objects[number] = row
    return objects
