"""Bundles: metadata and named buffers that are stored, read and removed together.

Every buffer lies in the pool as chunks, each a value of its own; a manifest (manifests.py), written last, says which
they are.  All of a bundle is stored, or nothing.
"""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mooncake.errors import ErrorCode
from mooncake.structured import manifests
from mooncake.structured.reading import Ranges, ReadError, gather, named, shortfall
from mooncake.structured.refs import RemoteBundleRef

CHUNK = 64 << 20  # bytes of a chunk, unless told otherwise

BundleRef = RemoteBundleRef | Mapping[str, Any]


@dataclass(frozen=True)
class Pieces:
    """Memory that a payload is put together from.  `owners` keep it; `more`: what the manifest says beside chunks."""

    addresses: Sequence[int]
    sizes: Sequence[int]
    owners: Sequence[Any]
    more: Mapping[str, Any]


def pieces_of(value: Any, name: str) -> Pieces:
    """The memory of an object of the buffer protocol.  Raises TypeError for any other, or if it is not contiguous."""
    try:
        view = memoryview(value)
        fits = view.c_contiguous and "O" not in view.format
    except (TypeError, ValueError, BufferError):
        fits = False
    if not fits:
        raise TypeError(f"{name!r} is {type(value).__name__}: expected bytes, or other contiguous memory of plain data")
    raw = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)  # it makes no array of nothing
    return Pieces([raw.ctypes.data], [raw.nbytes], [raw], {})


def chunk_size(value: Any) -> int:
    """Raises ValueError unless it is a positive number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"chunk_bytes must be a positive whole number, not {value!r}")
    return value


class Bundles:
    """The bundles of a store whose keys begin with `prefix`."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def put(
        self, meta: Pieces, buffers: Mapping[str, Pieces], partition: str, chunk_bytes: int, config: Any
    ) -> RemoteBundleRef:
        """Raises ValueError for names that cannot be parts of keys, RuntimeError if the pool does not take it."""
        object_id = f"{manifests.segment(partition, 'partition')}/{uuid.uuid4().hex}"
        base = manifests.base_of(self._prefix, object_id)
        named = {manifests.segment(name, "buffer name"): pieces for name, pieces in buffers.items()}
        values: list[_Value] = []
        manifest = {
            "version": manifests.VERSION,
            "layout": "bundle",
            "object_id": object_id,
            "meta": _payload(f"{base}/meta", meta, chunk_bytes, values),
            "buffers": {
                name: _payload(f"{base}/buffer/{name}", pieces, chunk_bytes, values) for name, pieces in named.items()
            },
        }
        self._store_all(values, f"{base}/manifest", json.dumps(manifest, separators=(",", ":")).encode(), config)
        return RemoteBundleRef(f"{base}/manifest", manifest)

    def manifest(self, ref: BundleRef) -> dict[str, Any]:
        """The manifest of a handle.  Raises ReadError if it is gone, ValueError if it is none."""
        if isinstance(ref, RemoteBundleRef):
            key, manifest = cast("Any", ref.manifest_key), cast("Any", ref.manifest)
        else:
            key, manifest = ref.get("manifest_key"), ref.get("manifest")
        if manifest:
            return manifests.checked(manifest, self._prefix)
        if not isinstance(key, str):
            raise ValueError("this is no handle of a bundle: expected a RemoteBundleRef or a mapping with manifest_key")
        raw = self._store.get(key)
        if not raw:
            raise ReadError(f"the bundle is gone from the pool: there is no {key!r}")
        return manifests.decode(raw, self._prefix, key)

    def read(self, wanted: Sequence[tuple[Mapping[str, Any], int]]) -> None:
        """Payloads, each wholly to an address, all in one batch.  Raises ReadError."""
        chunks: list[Mapping[str, Any]] = []
        addresses: list[int] = []
        for payload, start in wanted:
            address = start
            for chunk in payload["chunks"]:
                chunks.append(chunk)
                addresses.append(address)
                address += chunk["bytes"]
        sizes = [chunk["bytes"] for chunk in chunks]
        if chunks:
            codes = self._store.batch_get_into([chunk["key"] for chunk in chunks], addresses, sizes)
            for chunk, code in zip(chunks, codes, strict=True):
                _check(chunk["key"], code, chunk["bytes"])

    def read_bytes(self, payload: Mapping[str, Any]) -> bytes:
        """A payload wholly."""
        raw: npt.NDArray[np.uint8] = np.empty(payload["bytes"], np.uint8)
        self.read([(payload, raw.ctypes.data)])
        return raw.tobytes()

    def read_ranges(
        self, payload: Mapping[str, Any], address: int, sources: Sequence[int], sizes: Sequence[int], registered: bool
    ) -> None:
        """Ranges of a payload, one after another to an address.  Raises ReadError."""
        parts = list(_by_chunk(payload["chunks"], sources, sizes))
        for part, codes in zip(parts, gather(self._store, address, sum(sizes), parts, registered), strict=True):
            for code, size in zip(codes, part.sizes, strict=True):
                _check(part.key, code, size)

    def remove(self, ref: BundleRef) -> None:
        """Raises ReadError if there is no such bundle, ValueError for a handle that does not fit its manifest,
        RuntimeError if something of it could not be removed.  Values that are gone already are no error."""
        manifest = self.manifest(ref)
        key = f"{manifests.base_of(self._prefix, manifest['object_id'])}/manifest"
        given = ref.manifest_key if isinstance(ref, RemoteBundleRef) else ref.get("manifest_key", key)
        if given != key:
            raise ValueError(f"manifest_key {given!r} is not that of the manifest, {key!r}")
        keys = [*manifests.payload_keys(manifest), key]
        codes = self._store.batch_remove(keys, True)
        left = [
            (one, code) for one, code in zip(keys, codes, strict=True) if code not in (0, ErrorCode.OBJECT_NOT_FOUND)
        ]
        if left:
            one, code = left[0]
            raise RuntimeError(f"{len(left)} of {len(keys)} values could not be removed, first {one!r}: {named(code)}")

    def _store_all(self, values: "list[_Value]", manifest_key: str, manifest: bytes, config: Any) -> None:
        keys = [one.key for one in values]
        try:
            addresses, sizes = [one.addresses for one in values], [one.sizes for one in values]
            codes = self._store.batch_put_from_multi_buffers(keys, addresses, sizes, config) if keys else []
            for key, code in zip(keys, codes, strict=True):
                if code:
                    raise RuntimeError(f"{key!r} could not be stored: {named(code)}")
            code = self._store.put(manifest_key, manifest, config)
            if code:
                raise RuntimeError(f"the manifest {manifest_key!r} could not be stored: {named(code)}")
        except BaseException as error:
            try:
                self._store.batch_remove([*keys, manifest_key], True)
            except Exception as left:
                error.add_note(f"what had been stored of it may be there still: {left}")
            raise


@dataclass(frozen=True)
class _Value:
    key: str
    addresses: list[int]
    sizes: list[int]


def _payload(key: str, pieces: Pieces, chunk_bytes: int, values: list[_Value]) -> dict[str, Any]:
    """What the manifest says; its chunks are added to `values`."""
    cut = list(_cut(pieces, chunk_bytes))
    keys = [key] if len(cut) == 1 else [f"{key}/chunk/{number}" for number in range(len(cut))]
    values += [_Value(one, addresses, sizes) for one, (addresses, sizes) in zip(keys, cut, strict=True)]
    chunks = [{"key": one, "bytes": sum(sizes)} for one, (_, sizes) in zip(keys, cut, strict=True)]
    return {"key": key, "bytes": sum(pieces.sizes), "chunks": chunks, **pieces.more}


def _cut(pieces: Pieces, chunk_bytes: int) -> Iterator[tuple[list[int], list[int]]]:
    """Addresses and sizes of each chunk: all full but the last."""
    addresses: list[int] = []
    sizes: list[int] = []
    room = chunk_bytes
    for start, size in zip(pieces.addresses, pieces.sizes, strict=True):
        done = 0
        while done < size:
            part = min(size - done, room)
            addresses.append(start + done)
            sizes.append(part)
            done, room = done + part, room - part
            if not room:
                yield addresses, sizes
                addresses, sizes, room = [], [], chunk_bytes
    if sizes:
        yield addresses, sizes


def _by_chunk(chunks: Sequence[Mapping[str, Any]], sources: Sequence[int], sizes: Sequence[int]) -> Iterator[Ranges]:
    """The ranges, cut where chunks end, for each chunk that has some."""
    ends = np.cumsum([chunk["bytes"] for chunk in chunks])
    found: dict[int, Ranges] = {}
    target = 0
    for source, size in zip(sources, sizes, strict=True):
        at, end = source, source + size
        number = int(np.searchsorted(ends, at, side="right"))
        while at < end:
            begin = int(ends[number]) - chunks[number]["bytes"]
            part = min(end, int(ends[number])) - at
            ranges = found.setdefault(number, Ranges(chunks[number]["key"], [], [], []))
            ranges.targets.append(target)
            ranges.sources.append(at - begin)
            ranges.sizes.append(part)
            at, target, number = at + part, target + part, number + 1
    yield from found.values()


def _check(key: str, code: int, size: int) -> None:
    if code != size:
        raise ReadError(f"{key!r} cannot be read: {shortfall(code, size)}")
