"""The calls for bundles and structured objects."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mooncake.structured import values
from mooncake.structured.bundles import CHUNK, BundleRef, Bundles, chunk_size, pieces_of
from mooncake.structured.fields import array_over
from mooncake.structured.minimal import complete
from mooncake.structured.objects import (
    FIELDS,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
    array_field,
    decoded,
    encoded,
)
from mooncake.structured.parts import BundleTransferPolicy, StructuredMemberSlice, TensorObjectBuffer
from mooncake.structured.reading import planned, tensor_object
from mooncake.structured.refs import RemoteBundleRef

_WRAPPED = "__mooncake_wrapped_object__"


class ObjectCalls:
    """Works on a MooncakeDistributedStore that has been set up, or another store that has put, get and remove.  All its
    keys begin with `key_prefix`.

    `default_chunk_bytes`: bundles and structured objects are cut into values of at most so many bytes.  `buffer_pool`
    is accepted for programs that have one, and not needed: results own their memory, or lie in the caller's.
    """

    def __init__(
        self,
        store: Any,
        key_prefix: str = "bundle",
        default_chunk_bytes: int = CHUNK,
        buffer_pool: Any = None,
        policy: BundleTransferPolicy | None = None,
    ) -> None:
        if not isinstance(key_prefix, str) or not key_prefix.strip("/"):
            raise ValueError(f"key_prefix must be a string that is not empty, not {key_prefix!r}")
        self.store = store
        self.key_prefix = key_prefix.strip("/")
        self.default_chunk_bytes = chunk_size(default_chunk_bytes)
        self._store = complete(store)
        self._policy = policy or BundleTransferPolicy()
        self._bundles = Bundles(self._store, self.key_prefix)

    def put_bundle(
        self,
        meta: bytes | bytearray | memoryview,
        buffers: Mapping[str, Any],
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Store bytes `meta` and `buffers` (objects with contiguous memory) by name: all of them, or nothing.
        `config`: a ReplicateConfig for all values.

        Raises TypeError or ValueError for what cannot be stored, RuntimeError if the pool does not take it.
        """
        self._chosen(policy, max_inflight_put)
        pieces = {name: pieces_of(value, name) for name, value in buffers.items()}
        return self._bundles.put(pieces_of(meta, "meta"), pieces, partition, self._chunk(chunk_bytes), config)

    def remove_bundle(self, ref: BundleRef) -> None:
        """Remove a bundle or structured object, leased or not, by its handle or a mapping with `manifest_key`.

        Raises RuntimeError if it is not there (where only the pool knows its manifest) or cannot be removed, ValueError
        for a handle that does not fit.
        """
        self._bundles.remove(ref)

    def put_structured_object(
        self,
        payload: StructuredObjectPayload,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Store members with metadata that JSON can hold: all of them, or nothing.  Raises as put_bundle does."""
        meta, buffers = encoded(payload, self._chosen(policy, max_inflight_put))
        return self._bundles.put(meta, buffers, partition, self._chunk(chunk_bytes), config)

    def put_object(
        self,
        obj: Any,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Store a mapping of names to values, or one value.  Raises as put_bundle does."""
        if isinstance(obj, Mapping):
            payload = StructuredObjectPayload(buffers=obj)
        else:
            payload = StructuredObjectPayload({_WRAPPED: True}, {"value": obj})
        return self.put_structured_object(payload, partition, chunk_bytes, policy, max_inflight_put, config)

    def get_object(self, ref: BundleRef) -> Any:
        """What put_object was given.  Raises as materialize does."""
        result = self.materialize(self.read_spec(ref))
        return result.objects["value"] if result.metadata.get(_WRAPPED) else result.objects

    def read_spec(self, ref: BundleRef) -> StructuredObjectReadSpec:
        """What is to be read of a structured object: all of it, until it is told otherwise."""
        return StructuredObjectReadSpec(ref)

    def materialize(self, spec: StructuredObjectReadSpec) -> StructuredObjectResult:
        """Read the chosen members and rows into fresh memory.

        Raises RuntimeError if the object is gone, KeyError for a member that it does not have, ValueError for rows that
        cannot be chosen or what is no structured object.
        """
        return self.materialize_into(spec, None)

    def materialize_into(
        self, spec: StructuredObjectReadSpec, destinations: Mapping[str, Any] | None
    ) -> StructuredObjectResult:
        """As materialize; members that `destinations` names go into that array, tensor, tensor_object_buffer (a whole
        tensor) or raw_destination.  Raises ValueError for one that does not fit."""
        if spec.member_names is not None and not spec.member_names:
            raise ValueError("the read spec has selected no members")
        manifest = self._bundles.manifest(spec.ref)
        metadata = decoded(self._bundles.read_bytes(manifest["meta"]))
        buffers, known, slices = manifest["buffers"], metadata.get(FIELDS, {}), dict(spec.member_slices)
        names = list(buffers) if spec.member_names is None else list(spec.member_names)
        for asked in ([*names], [*slices], [*(destinations or {})]):
            missing = [name for name in asked if name not in buffers]
            if missing:
                raise KeyError(f"the object has no member {missing[0]!r}; it has {', '.join(buffers)}")
        reader = _Reader(self._bundles)
        for name in names:
            says = known.get(name, {"encoding": "bytes"})
            reader.add(name, says, buffers[name], slices.get(name), (destinations or {}).get(name))
        return StructuredObjectResult(metadata, reader.results())

    def _chunk(self, chunk_bytes: int | None) -> int:
        return self.default_chunk_bytes if chunk_bytes is None else chunk_size(chunk_bytes)

    def _chosen(self, policy: BundleTransferPolicy | None, max_inflight_put: int | None) -> BundleTransferPolicy:
        policy = policy or self._policy
        if max_inflight_put is None:
            return policy
        return BundleTransferPolicy(max_inflight_put, policy.put_mode, policy.copy_mode)


class _Reader:
    """Members that are read wholly wait until all are known, and then cross in one batch."""

    def __init__(self, bundles: Bundles) -> None:
        self._bundles = bundles
        self._whole: list[tuple[Mapping[str, Any], int]] = []
        self._results: dict[str, Any] = {}
        self._raw: dict[str, tuple[str, Any]] = {}  # encoding and memory of members that are made from their bytes

    def add(
        self, name: str, says: Any, payload: Mapping[str, Any], rows: StructuredMemberSlice | None, destination: Any
    ) -> None:
        encoding = says.get("encoding", "bytes") if isinstance(says, Mapping) else None
        if encoding in ("bytes", "value"):
            self._add_raw(name, encoding, payload, rows, destination)
        elif encoding in ("ndarray", "torch_tensor"):
            self._add_array(name, says, payload, rows, destination)
        else:
            raise ValueError(f"member {name!r} has an unsupported structured field encoding, {encoding!r}")

    def results(self) -> dict[str, Any]:
        self._bundles.read(self._whole)
        for name, (encoding, raw) in self._raw.items():
            self._results[name] = raw.tobytes() if encoding == "bytes" else values.decode(raw.data)
        return self._results

    def _add_raw(
        self, name: str, encoding: str, payload: Mapping[str, Any], rows: StructuredMemberSlice | None, destination: Any
    ) -> None:
        if rows is not None:
            raise ValueError(f"member {name!r} has the encoding {encoding}, which does not support slicing")
        if destination is not None:
            raise ValueError(f"member {name!r} has the encoding {encoding}: it cannot be read into a destination")
        raw = np.empty(payload["bytes"], np.uint8)
        self._raw[name] = encoding, raw
        self._results[name] = None  # its place among the others
        self._whole.append((payload, raw.ctypes.data))

    def _add_array(
        self,
        name: str,
        says: Mapping[str, Any],
        payload: Mapping[str, Any],
        rows: StructuredMemberSlice | None,
        destination: Any,
    ) -> None:
        wanted = array_field(name, says, payload)
        if rows is not None and wanted.rows is None:
            raise ValueError(f"member {name!r} has no dimensions: it has no rows to choose from")
        indexes = None if rows is None else rows.numbers(wanted.shape[0])
        if isinstance(destination, TensorObjectBuffer):
            self._results[name] = tensor_object(wanted, indexes, destination)
            self._whole.append((payload, destination.ptr))
        elif destination is None and indexes is None:
            raw = np.empty(wanted.size, np.uint8)
            self._results[name] = array_over(wanted, raw[wanted.data_at :], wanted.shape)
            self._whole.append((payload, raw.ctypes.data))
        else:
            plan = planned(wanted, indexes, destination)
            self._results[name] = plan.result
            if plan.sizes:
                self._bundles.read_ranges(payload, plan.address, plan.sources, plan.sizes, plan.registered)
