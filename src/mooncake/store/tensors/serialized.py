"""A tensor as bytes, without a store: what engines use to move tensors by other ways."""

from typing import Any

from mooncake.store.tensors.header import SIZE
from mooncake.store.tensors.local import from_bytes, from_torch, to_torch


def _serialize_tensor(tensor: Any) -> tuple[bytes, int, int, Any]:
    """(header, address of the data, bytes of the data, what keeps them alive).  Raises ValueError."""
    local = from_torch(tensor)
    if local is None:
        raise ValueError("unsupported tensor for Mooncake tensor serialization")
    return local.header.pack(), local.address, local.header.data_size, local.owner


def _deserialize_tensor(payload: bytes) -> Any:
    """The tensor that header and data are.  Raises ValueError."""
    local = from_bytes(payload) if isinstance(payload, bytes) else None
    if local is None:
        raise ValueError("invalid serialized Mooncake tensor payload")
    return to_torch(local)


def _tensor_metadata_size() -> int:
    """Bytes of the header."""
    return SIZE
