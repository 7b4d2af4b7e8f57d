"""MooncakeBundleTransfer: batches of named fields put, extended, read in part and removed."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mooncake.errors import ErrorCode
from mooncake.structured import values
from mooncake.structured.fields import Field, Source, source
from mooncake.structured.parts import BundleTransferPolicy, Rows, chosen
from mooncake.structured.reading import ReadError, read
from mooncake.structured.refs import FieldPlace, MooncakeDataProtoRef, import_dataproto_ref

_SECTIONS = ("batch", "non_tensor_batch")
_PARTS = {*_SECTIONS, "meta_info"}
_FORMAT = 1

Handle = MooncakeDataProtoRef | dict[str, Any]


class MooncakeBundleTransfer:
    """Works on a MooncakeDistributedStore that has been set up.  All its keys begin with `key_prefix`."""

    def __init__(self, store: Any, key_prefix: str = "mooncake", policy: BundleTransferPolicy | None = None) -> None:
        self._store = store
        self._prefix = key_prefix
        self._policy = policy or BundleTransferPolicy()

    def put_dataproto(
        self,
        data: Any,
        *,
        namespace: str = "default",
        partition: str = "default",
        stage: str = "default",
        policy: BundleTransferPolicy | None = None,
        global_indexes: Sequence[int] | None = None,
    ) -> MooncakeDataProtoRef:
        """Store a batch: an object or dictionary with `batch`, `non_tensor_batch` and `meta_info`; another dictionary
        is a batch itself.  Its fields must have equally many rows, but for tensors without dimensions.

        Raises TypeError or ValueError for what cannot be stored, RuntimeError if the pool does not take it; then
        nothing of it is left there.
        """
        sections, meta = _parts(data)
        manifest, fields = self._write(sections, meta, f"{namespace}/{partition}/{stage}", policy)
        rows = _row_count(fields)
        return MooncakeDataProtoRef(
            {stage: manifest},
            {one.name: FieldPlace(stage, one.name, one.section) for one in fields},
            rows or 0,
            namespace,
            partition,
            meta,
            None if global_indexes is None else [int(index) for index in global_indexes],
        )

    def append_dataproto_fields(
        self,
        ref: Handle,
        data: Any,
        *,
        stage: str,
        overwrite: bool = False,
        policy: BundleTransferPolicy | None = None,
    ) -> MooncakeDataProtoRef:
        """Store further fields of the same rows as another stage; the handle of all of them.  What is there is not
        written again.

        `overwrite`: fields may be there already, if all of their stage are given anew; the old stage is removed once
        the new one is stored.  Raises as put_dataproto does.
        """
        ref = import_dataproto_ref(ref)
        sections, meta = _parts(data)
        names = {name for section in sections.values() for name in section}
        replaced = self._replaced(ref, names, stage, overwrite)
        manifest, fields = self._write(sections, meta, f"{ref.namespace}/{ref.partition}/{stage}", policy)
        rows = _row_count(fields)
        if rows is not None and ref.batch_size and rows != ref.batch_size:
            self._remove([manifest, *(one.key for one in fields if one.size)])
            raise ValueError(f"the new fields have {rows} rows, but the batch has {ref.batch_size}")
        kept = {name: place for name, place in ref.field_index.items() if place.stage not in replaced}
        stages = {name: key for name, key in ref.stage_refs.items() if name not in replaced}
        for old in replaced:
            self._remove_stage(ref.stage_refs[old])
        return MooncakeDataProtoRef(
            {**stages, stage: manifest},
            {**kept, **{one.name: FieldPlace(stage, one.name, one.section) for one in fields}},
            ref.batch_size or rows or 0,
            ref.namespace,
            ref.partition,
            {**ref.meta_info, **meta},
            ref.global_indexes,
        )

    def get_dataproto(
        self,
        ref: Handle,
        *,
        fields: Iterable[str] | None = None,
        batch_fields: Iterable[str] | None = None,
        non_tensor_fields: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        data_cls: Any = None,
        destinations: Mapping[str, Any] | None = None,
        rows: Rows | None = None,
    ) -> Any:
        """The named fields (by default all) of the chosen rows, as {"batch", "non_tensor_batch", "meta_info"} or as a
        `data_cls` of them.

        `destinations`: by field, an array, tensor, tensor_object_buffer or raw_destination that it is read into.
        Raises KeyError for a field that the batch does not have, RuntimeError for one that is gone from the pool.
        """
        ref = import_dataproto_ref(ref)
        wanted = self._wanted(ref, fields, batch_fields, non_tensor_fields)
        indexes = chosen(rows, ref.batch_size)
        unknown = set(destinations or ()) - set(wanted)
        if unknown:
            raise KeyError(f"destinations names {sorted(unknown)}, which are not among the fields that are read")
        manifests = self._manifests(ref, {ref.field_index[name].stage for name in wanted})
        found = [manifests[ref.field_index[name].stage][name] for name in wanted]
        results = read(self._store, found, indexes, destinations or {})
        sections: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
        for name in wanted:
            sections[ref.field_index[name].section][name] = results[name]
        meta = ref.meta_info if meta_info_keys is None else {key: ref.meta_info[key] for key in meta_info_keys}
        return _made(data_cls, sections["batch"], sections["non_tensor_batch"], dict(meta))

    def dataproto_manifest_view(self, ref: Handle) -> dict[str, Any]:
        """What the manifests say: for each stage the key of its manifest, and each field's section, kind, type, shape
        and bytes."""
        ref = import_dataproto_ref(ref)
        stages = {
            stage: {
                "manifest_key": ref.stage_refs[stage],
                "fields": {
                    name: {
                        "section": one.section,
                        "kind": one.kind,
                        "dtype": one.dtype,
                        "shape": list(one.shape),
                        "nbytes": one.size,
                        "key": one.key,
                    }
                    for name, one in manifest.items()
                },
            }
            for stage, manifest in self._manifests(ref, set(ref.stage_refs)).items()
        }
        return {
            "namespace": ref.namespace,
            "partition": ref.partition,
            "batch_size": ref.batch_size,
            "meta_info": dict(ref.meta_info),
            "stages": stages,
        }

    def cleanup_dataproto(self, ref: Handle) -> None:
        """Remove all stages from the pool.  What is gone already is no error."""
        for manifest in import_dataproto_ref(ref).stage_refs.values():
            self._remove_stage(manifest)

    def release_result(self, result: Any) -> None:
        """Results own their memory, or lie in the caller's: there is nothing to give back."""

    def _write(
        self, sections: dict[str, dict[str, Any]], meta: dict[str, Any], path: str, policy: BundleTransferPolicy | None
    ) -> tuple[str, list[Field]]:
        """Key of the manifest, and the fields."""
        root = f"{self._prefix}/{path}/{uuid.uuid4().hex}"
        sources: list[Source] = []
        for section, named in sections.items():
            for name, value in named.items():
                if any(one.described.name == name for one in sources):
                    raise ValueError(f"field {name!r} is both in batch and in non_tensor_batch")
                sources.append(source(name, section, value, f"{root}/{section}/{name}", policy or self._policy))
        fields = [one.described for one in sources]
        _row_count(fields)
        stored = {"format": _FORMAT, "fields": [asdict(one) for one in fields]}
        values.encode(meta, "meta_info")  # it goes with the handle, and must be able to
        manifest = f"{root}/manifest"
        self._store_all(sources)
        code = self._store.put(manifest, values.encode(stored, "the manifest"))
        if code:
            self._remove([one.key for one in fields if one.size])
            raise RuntimeError(f"the manifest could not be stored: {_named(code)}")
        return manifest, fields

    def _store_all(self, sources: list[Source]) -> None:
        full = [one for one in sources if one.described.size]
        keys = [one.described.key for one in full]
        addresses, sizes = [one.addresses for one in full], [one.sizes for one in full]
        codes = self._store.batch_put_from_multi_buffers(keys, addresses, sizes)
        failed = next((index for index, code in enumerate(codes) if code), None)
        if failed is not None:
            self._remove(keys)
            name = full[failed].described.name
            raise RuntimeError(f"field {name!r} could not be stored: {_named(codes[failed])}")

    def _manifests(self, ref: MooncakeDataProtoRef, stages: set[str]) -> dict[str, dict[str, Field]]:
        ordered = sorted(stages)
        raws = self._store.get_batch([ref.stage_refs[stage] for stage in ordered]) if ordered else []
        manifests = {}
        for stage, raw in zip(ordered, raws, strict=True):
            if not raw:
                raise ReadError(f"stage {stage!r} is gone from the pool: there is no {ref.stage_refs[stage]!r}")
            manifests[stage] = _fields_of(raw)
        return manifests

    def _wanted(
        self,
        ref: MooncakeDataProtoRef,
        fields: Iterable[str] | None,
        batch_fields: Iterable[str] | None,
        non_tensor_fields: Iterable[str] | None,
    ) -> list[str]:
        """Names in the order of the batch."""
        if fields is None and batch_fields is None and non_tensor_fields is None:
            return list(ref.field_index)
        asked = list(fields or ())
        for names, section in ((batch_fields, "batch"), (non_tensor_fields, "non_tensor_batch")):
            for name in names or ():
                if name in ref.field_index and ref.field_index[name].section != section:
                    raise KeyError(f"field {name!r} is in {ref.field_index[name].section}, not in {section}")
                asked.append(name)
        missing = [name for name in asked if name not in ref.field_index]
        if missing:
            raise KeyError(f"the batch has no field {missing[0]!r}; it has {', '.join(ref.field_index)}")
        return [name for name in ref.field_index if name in set(asked)]

    def _replaced(self, ref: MooncakeDataProtoRef, names: set[str], stage: str, overwrite: bool) -> set[str]:
        """Stages that the new fields take the place of."""
        there = names & set(ref.field_index)
        if there and not overwrite:
            raise ValueError(f"field {min(there)!r} is there already; overwrite=True replaces all fields of a stage")
        replaced = {ref.field_index[name].stage for name in there}
        if stage in ref.stage_refs and not (overwrite and stage in replaced):
            raise ValueError(f"stage {stage!r} is there already: give the new fields a stage of their own")
        left = {name for name, place in ref.field_index.items() if place.stage in replaced} - names
        if left:
            raise ValueError(f"field {min(left)!r} is of a stage that would be replaced, but not among the new fields")
        return replaced

    def _remove_stage(self, manifest: str) -> None:
        raw = self._store.get(manifest)
        keys = [one.key for one in _fields_of(raw).values() if one.size] if raw else []
        self._remove([*keys, manifest])

    def _remove(self, keys: list[str]) -> None:
        self._store.batch_remove(keys, True)


def _parts(data: Any) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Fields by section, and metadata."""
    if isinstance(data, dict):
        parts = data if data and set(data) <= _PARTS else {"batch": data}
    else:
        parts = {name: getattr(data, name, None) for name in _PARTS}
        if all(part is None for part in parts.values()):
            raise TypeError(f"a {type(data).__name__} has neither batch nor non_tensor_batch nor meta_info")
    return {section: _items(parts.get(section)) for section in _SECTIONS}, _items(parts.get("meta_info"))


def _items(part: Any) -> dict[str, Any]:
    """Of a dictionary, or of what is like one (TensorDict)."""
    return {} if part is None else dict(part.items())


def _row_count(fields: list[Field]) -> int | None:
    """Raises ValueError unless all have equally many."""
    counts = {one.name: one.rows for one in fields if one.rows is not None}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(f"the fields of a batch must have equally many rows, but these have: {shown}")
    return next(iter(counts.values()), None)


def _fields_of(raw: bytes) -> dict[str, Field]:
    manifest = values.decode(raw)
    if manifest["format"] != _FORMAT:
        raise ReadError(f"a manifest of format {manifest['format']}, but this version reads {_FORMAT}")
    return {one["name"]: Field(**one) for one in manifest["fields"]}


def _made(data_cls: Any, batch: dict[str, Any], non_tensors: dict[str, Any], meta: dict[str, Any]) -> Any:
    if data_cls is None:
        return {"batch": batch, "non_tensor_batch": non_tensors, "meta_info": meta}
    if hasattr(data_cls, "from_dict"):
        return data_cls.from_dict(batch, non_tensors, meta_info=meta)
    return data_cls(batch=batch, non_tensor_batch=non_tensors, meta_info=meta)


def _named(code: int) -> str:
    return f"{ErrorCode(code).name} ({code})" if code in ErrorCode._value2member_map_ else str(code)
