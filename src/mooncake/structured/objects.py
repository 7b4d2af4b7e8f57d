"""Structured objects: named members (arrays, tensors, bytes and plain values) with metadata, of which readers take the
members and rows that they need.

Each is a bundle whose metadata are JSON and say under FIELDS what every member is:

bytes           any bytes
ndarray         an array's bytes, and its `dtype` and `shape`
torch_tensor    a tensor object or, where there is no such form, a tensor's bytes, and its `dtype` and `shape`; the
                payload's `metadata_bytes` are what stands before the data
value           other values of Python, see values.py
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np

from mooncake.store.tensors import header
from mooncake.structured import values
from mooncake.structured.bundles import BundleRef, Pieces, pieces_of
from mooncake.structured.fields import Field, source
from mooncake.structured.parts import BundleTransferPolicy, StructuredMemberSlice, TensorObjectBuffer

FIELDS = "__mooncake_structured_fields__"


@dataclass(frozen=True, init=False)
class StructuredObjectPayload:
    """What is to be stored: `buffers` by name, and `metadata` that JSON can hold."""

    metadata: Mapping[str, Any]
    buffers: Mapping[str, Any]

    def __init__(self, metadata: Mapping[str, Any] | None = None, buffers: Mapping[str, Any] | None = None) -> None:
        if buffers is None:
            raise TypeError("a StructuredObjectPayload needs buffers")
        object.__setattr__(self, "metadata", {} if metadata is None else metadata)
        object.__setattr__(self, "buffers", buffers)


@dataclass
class StructuredObjectResult:
    """What was read: the whole `metadata`, and the chosen members in `objects`."""

    metadata: dict[str, Any]
    objects: dict[str, Any]


@dataclass(frozen=True)
class StructuredObjectReadSpec:
    """What is to be read of a structured object: by default all members wholly.  Nothing is asked of the pool until
    it is materialized."""

    ref: BundleRef
    member_names: tuple[str, ...] | None = None
    member_slices: tuple[tuple[str, StructuredMemberSlice], ...] = ()

    def select_members(self, names: Sequence[str] | None) -> "StructuredObjectReadSpec":
        """The same with these members only; None: all."""
        return replace(self, member_names=None if names is None else tuple(names))

    def slice_member(self, name: str, axis: int, start: int, end: int, step: int = 1) -> "StructuredObjectReadSpec":
        """The same with rows `start` to `end` (without it) of one member."""
        slices = {**dict(self.member_slices), name: StructuredMemberSlice(axis, start, end, step)}
        return replace(self, member_slices=tuple(slices.items()))

    def member_slice(self, name: str) -> StructuredMemberSlice | None:
        """The rows chosen of a member; None: all."""
        return dict(self.member_slices).get(name)


def encoded(payload: StructuredObjectPayload, policy: BundleTransferPolicy) -> tuple[Pieces, dict[str, Pieces]]:
    """Metadata and buffers as a bundle has them.  Raises TypeError or ValueError that name what cannot be stored."""
    metadata = payload.metadata
    if not isinstance(metadata, Mapping):
        raise TypeError(f"the metadata of a structured object must be a mapping, not {type(metadata).__name__}")
    if FIELDS in metadata:
        raise ValueError(f"the name {FIELDS!r} is reserved: metadata cannot have it")
    members = {name: _member(name, value, policy) for name, value in payload.buffers.items()}
    whole = {"layout": "structured", **metadata}
    if members:
        whole[FIELDS] = {name: says for name, (says, _) in members.items()}
    try:
        raw = json.dumps(whole, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"the metadata of a structured object must be JSON-serializable: {error}") from None
    return pieces_of(raw, "meta"), {name: pieces for name, (_, pieces) in members.items()}


def decoded(raw: bytes) -> dict[str, Any]:
    """The metadata.  Raises ValueError for a bundle that is no structured object."""
    try:
        metadata = json.loads(raw)
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict) or not isinstance(metadata.get(FIELDS, {}), dict):
        raise ValueError("this bundle is no structured object: its metadata are not a mapping in JSON")
    return metadata


def array_field(name: str, says: Mapping[str, Any], payload: Mapping[str, Any]) -> Field:
    """An array or tensor as the reader of fields knows it.  Raises ValueError if it is not described as this package
    does, or its description does not fit its bytes."""
    tensor = says["encoding"] == "torch_tensor"
    dtype, shape, data_at = says.get("dtype"), says.get("shape"), payload.get("metadata_bytes", 0)
    if "format" in payload or "kind" in payload:
        how = payload.get("format", payload.get("kind"))
        raise ValueError(f"member {name!r} is a tensor in the form {how!r}, which is not read: nothing is unpickled")
    item = _item_size(dtype, tensor) if isinstance(dtype, str) else None
    if item is None or not _is_shape(shape) or data_at not in (0, header.SIZE):
        raise ValueError(f"member {name!r} has no type and shape that are known here: {dict(says)}")
    size = payload["bytes"]
    if data_at + math.prod(shape) * item != size:
        raise ValueError(f"member {name!r} has {size} bytes, which are not the shape {shape} of {dtype}")
    kind = "object" if data_at else "array"
    return Field(name, "", kind, "torch" if tensor else "numpy", str(dtype), list(shape), size, payload["key"])


def _member(name: str, value: Any, policy: BundleTransferPolicy) -> tuple[dict[str, Any], Pieces]:
    """What the metadata say of a member, and its memory."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {"encoding": "bytes"}, pieces_of(value, name)
    if isinstance(value, np.ndarray) and value.dtype.names is not None:
        raise TypeError(f"member {name!r} is an array of records: give {', '.join(value.dtype.names)} by themselves")
    array = isinstance(value, np.ndarray) and not value.dtype.hasobject
    if array or values.is_tensor(value) or isinstance(value, TensorObjectBuffer):
        return _array(name, value, policy)
    if policy.copy_mode == "zero_copy":
        raise ValueError(f"member {name!r} must be encoded, which zero_copy forbids: use copy_mode auto")
    return {"encoding": "value"}, pieces_of(values.encode(value, f"member {name!r}"), name)


def _array(name: str, value: Any, policy: BundleTransferPolicy) -> tuple[dict[str, Any], Pieces]:
    found = source(name, "", value, "", policy)
    one = found.described
    says = {
        "encoding": "ndarray" if one.container == "numpy" else "torch_tensor",
        "dtype": one.dtype,
        "shape": one.shape,
    }
    more = {} if one.container == "numpy" else {"metadata_bytes": one.data_at}
    return says, Pieces(found.addresses, found.sizes, found.owners, more)


def _is_shape(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(extent) is int and extent >= 0 for extent in value)


def _item_size(dtype: str, tensor: bool) -> int | None:
    """Bytes of an element; None if there is no such type."""
    if tensor:
        return values.item_size(dtype)
    try:
        found = np.dtype(dtype)
    except TypeError:
        return None
    return None if found.hasobject else found.itemsize
