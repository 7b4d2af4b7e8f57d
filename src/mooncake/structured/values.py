"""Values of Python as bytes and back: what rows and metadata are made of.  Nothing is pickled, so reading runs no code.

None, bool, int of 64 bits, float, str, bytes, list, tuple, dict, numpy's arrays and scalars, and torch's tensors keep
their types.
"""

import sys
from typing import Any

import msgspec
import numpy as np

_TUPLE, _ARRAY, _TENSOR = 1, 2, 3
_PLAIN = (type(None), bool, int, float, str, bytes)


def encode(value: Any, what: str) -> bytes:
    """Raises TypeError or ValueError that name `what` for a value that has no such form."""
    try:
        return msgspec.msgpack.encode(_plain(value, what))
    except OverflowError:
        raise ValueError(f"{what} has a whole number that does not fit into 64 bits") from None


def decode(raw: bytes | memoryview) -> Any:
    return _decoder.decode(raw)


def is_tensor(value: Any) -> bool:
    """Whether it is torch's; without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def tensor_bytes(tensor: Any) -> Any:
    """A contiguous tensor's memory, on whatever device, as a one-dimensional tensor of bytes."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensor_from(raw: Any, dtype: str, shape: list[int]) -> Any:
    """A torch tensor over a writable buffer of bytes."""
    import torch

    kind = getattr(torch, dtype)
    if not len(raw):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(shape)


def dtype_of(tensor: Any) -> str:
    """torch's name of the element type."""
    return str(tensor.dtype).removeprefix("torch.")


def item_size(dtype: str) -> int | None:
    """Bytes of an element of torch's type of that name; None if torch has no such type."""
    import torch

    kind = getattr(torch, dtype, None)
    return int(kind.itemsize) if isinstance(kind, torch.dtype) else None


def _plain(value: Any, what: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_plain(item, what) for item in value]
    if kind is tuple:
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([_plain(item, what) for item in value]))
    if kind is dict:
        return {_key(key, what): _plain(item, what) for key, item in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError(f"{what} has an array of objects inside of a row: make it a list")
        return _ext(_ARRAY, array.dtype.str, array.shape, array.tobytes(), isinstance(value, np.generic))
    if is_tensor(value):
        raw = bytes(tensor_bytes(value.cpu()).numpy())
        return _ext(_TENSOR, dtype_of(value), value.shape, raw, False)
    raise TypeError(
        f"{what} has a {kind.__module__}.{kind.__qualname__}: expected None, bool, int, float, str, bytes, "
        "list, tuple, dict, numpy arrays or torch tensors"
    )


def _key(key: Any, what: str) -> Any:
    if type(key) not in (str, int, bytes):
        raise TypeError(f"{what} has a dictionary with a key of type {type(key).__name__}: expected str, int or bytes")
    return key


def _ext(code: int, dtype: str, shape: Any, raw: bytes, scalar: bool) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode((dtype, list(shape), raw, scalar)))


def _restore(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(_decoder.decode(data))
    dtype, shape, raw, scalar = msgspec.msgpack.decode(data)
    if code == _TENSOR:
        return tensor_from(bytearray(raw), dtype, shape)
    array = np.frombuffer(bytearray(raw), np.dtype(dtype)).reshape(shape)
    return array[()] if scalar else array


_decoder = msgspec.msgpack.Decoder(ext_hook=_restore)
