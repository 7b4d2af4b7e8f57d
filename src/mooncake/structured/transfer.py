"""MooncakeBundleTransfer: batches of named fields put, extended, read in part and removed."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from mooncake.structured import flat, schemas, values
from mooncake.structured.batches import SECTIONS, check_type, made, row_count, selected, sorted_out, superseded
from mooncake.structured.fields import Field, Source, source
from mooncake.structured.object_calls import ObjectCalls
from mooncake.structured.parts import BundleTransferPolicy, Rows, chosen
from mooncake.structured.reading import ReadError, named, read
from mooncake.structured.refs import (
    MooncakeDataProtoRef,
    RemoteBundleRef,
    StructuredFieldLocation,
    import_dataproto_ref,
)

_FORMAT = 1

Handle = MooncakeDataProtoRef | Mapping[str, Any]
PayloadType = Literal["dataproto", "dict"]


class MooncakeBundleTransfer(ObjectCalls):
    """Bundles and structured objects as of ObjectCalls, and batches of named fields."""

    def put(
        self,
        data: Any,
        *,
        type: PayloadType = "dataproto",  # noqa: A002 - the name that callers give
        namespace: str = "default",
        partition: str = "default",
        stage: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        field_schemas: schemas.Schemas | None = None,
        config: Any = None,
        global_indexes: Sequence[int] | None = None,
    ) -> MooncakeDataProtoRef:
        """Store a batch: an object or dictionary with `batch`, `non_tensor_batch` and `meta_info`; another dictionary
        is a batch itself, or with the type "dict" sorted into these parts (flat.py).  Its fields must have equally many
        rows, but for tensors without dimensions.

        `config`: a ReplicateConfig for all values.  `chunk_bytes` is checked only: a field is one value, of any size.
        Raises TypeError or ValueError for what cannot be stored, RuntimeError if the pool does not take it; then
        nothing of it is left there.
        """
        check_type(type)
        self._chunk(chunk_bytes)
        sections, meta = sorted_out(flat.envelope(data, field_schemas or {}) if type == "dict" else data, field_schemas)
        manifest, fields = self._write(sections, meta, f"{namespace}/{partition}/{stage}", policy, config)
        return MooncakeDataProtoRef(
            row_count(fields) or 0,
            {stage: RemoteBundleRef(manifest, {})},
            {one.name: StructuredFieldLocation(stage, one.name, one.section) for one in fields},
            meta,
            namespace,
            partition,
            None if global_indexes is None else [int(index) for index in global_indexes],
        )

    def get(
        self,
        ref: Handle,
        *,
        type: PayloadType = "dataproto",  # noqa: A002 - the name that callers give
        fields: Iterable[str] | None = None,
        batch_fields: Iterable[str] | None = None,
        non_tensor_fields: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        data_cls: Any = None,
        destinations: Mapping[str, Any] | None = None,
        rows: Rows | None = None,
    ) -> Any:
        """The named fields (by default all) of the chosen rows, as {"batch", "non_tensor_batch", "meta_info"}, as a
        `data_cls` of them, or with the type "dict" as one flat dictionary.

        `destinations`: by field, an array, tensor, tensor_object_buffer or raw_destination that it is read into.
        Raises KeyError for a field that the batch does not have, RuntimeError for one that is gone from the pool.
        """
        check_type(type)
        ref = import_dataproto_ref(ref)
        wanted = selected(ref, fields, batch_fields, non_tensor_fields)
        indexes = chosen(rows, ref.batch_size)
        unknown = set(destinations or ()) - set(wanted)
        if unknown:
            raise KeyError(f"destinations names {sorted(unknown)}, which are not among the fields that are read")
        manifests = self._manifests(ref, {ref.field_index[name].stage for name in wanted})
        found = [manifests[ref.field_index[name].stage][name] for name in wanted]
        results = read(self._store, found, indexes, destinations or {})
        sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for name in wanted:
            sections[ref.field_index[name].section][name] = results[name]
        names = ref.meta_info if meta_info_keys is None else [key for key in meta_info_keys if key in ref.meta_info]
        meta = {name: ref.meta_info[name] for name in names}
        if type == "dict":
            return flat.flattened({**sections, "meta_info": meta})
        return made(data_cls, sections["batch"], sections["non_tensor_batch"], meta)

    def put_dataproto(self, data: Any, **options: Any) -> MooncakeDataProtoRef:
        """put with the type "dataproto", whose options it takes."""
        return self.put(data, type="dataproto", **options)

    def get_dataproto(self, ref: Handle, **options: Any) -> Any:
        """get with the type "dataproto", whose options it takes."""
        return self.get(ref, type="dataproto", **options)

    def put_dict(self, data: Mapping[str, Any], **options: Any) -> MooncakeDataProtoRef:
        """put with the type "dict", whose options it takes."""
        return self.put(data, type="dict", **options)

    def get_dict(self, ref: Handle) -> dict[str, Any]:
        """The whole batch as a flat dictionary."""
        flattened: dict[str, Any] = self.get(ref, type="dict")
        return flattened

    def remove_dict(self, ref: Handle) -> None:
        """As cleanup_dataproto."""
        self.cleanup_dataproto(ref)

    put_legacy_dict = put_dict
    get_legacy_dict = get_dict
    remove_legacy_dict = remove_dict

    def append_dataproto_fields(
        self,
        ref: Handle,
        data: Any,
        *,
        stage: str,
        overwrite: bool = False,
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        field_schemas: schemas.Schemas | None = None,
        config: Any = None,
    ) -> MooncakeDataProtoRef:
        """Store further fields of the same rows as another stage; the handle of all of them.  What is there is not
        written again.

        `overwrite`: fields may be there already, if all of their stage are given anew; the old stage is removed once
        the new one is stored.  Raises as put does.
        """
        self._chunk(chunk_bytes)
        ref = import_dataproto_ref(ref)
        sections, meta = sorted_out(data, field_schemas)
        names = {name for section in sections.values() for name in section}
        replaced = superseded(ref, names, stage, overwrite)
        manifest, fields = self._write(sections, meta, f"{ref.namespace}/{ref.partition}/{stage}", policy, config)
        rows = row_count(fields)
        if rows is not None and ref.batch_size and rows != ref.batch_size:
            self._remove([manifest, *(one.key for one in fields if one.size)])
            raise ValueError(f"the new fields have {rows} rows, but the batch has {ref.batch_size}")
        kept = {name: place for name, place in ref.field_index.items() if place.stage not in replaced}
        stages = {name: one for name, one in ref.stage_refs.items() if name not in replaced}
        for old in replaced:
            self._remove_stage(ref.stage_refs[old].manifest_key)
        return MooncakeDataProtoRef(
            ref.batch_size or rows or 0,
            {**stages, stage: RemoteBundleRef(manifest, {})},
            {**kept, **{one.name: StructuredFieldLocation(stage, one.name, one.section) for one in fields}},
            {**ref.meta_info, **meta},
            ref.namespace,
            ref.partition,
            ref.global_indexes,
        )

    def dataproto_manifest_view(self, ref: Handle) -> dict[str, Any]:
        """What the manifests say: for each stage the key of its manifest, and each field's section, kind, type, shape
        and bytes."""
        ref = import_dataproto_ref(ref)
        stages = {
            stage: {
                "manifest_key": ref.stage_refs[stage].manifest_key,
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
        for stage in import_dataproto_ref(ref).stage_refs.values():
            self._remove_stage(stage.manifest_key)

    @staticmethod
    def release_result(result: Any) -> None:
        """Results own their memory, or lie in the caller's: there is nothing to give back."""

    def _write(
        self,
        sections: dict[str, dict[str, Any]],
        meta: dict[str, Any],
        path: str,
        policy: BundleTransferPolicy | None,
        config: Any,
    ) -> tuple[str, list[Field]]:
        """Key of the manifest, and the fields."""
        root = f"{self.key_prefix}/{path}/{uuid.uuid4().hex}"
        sources: list[Source] = []
        for section, of_section in sections.items():
            for name, value in of_section.items():
                if any(one.described.name == name for one in sources):
                    raise ValueError(f"field {name!r} is both in batch and in non_tensor_batch")
                sources.append(source(name, section, value, f"{root}/{section}/{name}", policy or self._policy))
        fields = [one.described for one in sources]
        row_count(fields)
        stored = {"format": _FORMAT, "fields": [asdict(one) for one in fields]}
        values.encode(meta, "meta_info")  # it goes with the handle, and must be able to
        manifest = f"{root}/manifest"
        self._store_all(sources, config)
        code = self._store.put(manifest, values.encode(stored, "the manifest"), config)
        if code:
            self._remove([one.key for one in fields if one.size])
            raise RuntimeError(f"the manifest could not be stored: {named(code)}")
        return manifest, fields

    def _store_all(self, sources: list[Source], config: Any) -> None:
        full = [one for one in sources if one.described.size]
        keys = [one.described.key for one in full]
        addresses, sizes = [one.addresses for one in full], [one.sizes for one in full]
        codes = self._store.batch_put_from_multi_buffers(keys, addresses, sizes, config)
        failed = next((index for index, code in enumerate(codes) if code), None)
        if failed is not None:
            self._remove(keys)
            name = full[failed].described.name
            raise RuntimeError(f"field {name!r} could not be stored: {named(codes[failed])}")

    def _manifests(self, ref: MooncakeDataProtoRef, stages: set[str]) -> dict[str, dict[str, Field]]:
        ordered = sorted(stages)
        keys = [ref.stage_refs[stage].manifest_key for stage in ordered]
        raws = self._store.get_batch(keys) if ordered else []
        manifests = {}
        for stage, key, raw in zip(ordered, keys, raws, strict=True):
            if not raw:
                raise ReadError(f"stage {stage!r} is gone from the pool: there is no {key!r}")
            manifests[stage] = _fields_of(raw)
        return manifests

    def _remove_stage(self, manifest: str) -> None:
        raw = self._store.get(manifest)
        keys = [one.key for one in _fields_of(raw).values() if one.size] if raw else []
        self._remove([*keys, manifest])

    def _remove(self, keys: list[str]) -> None:
        self._store.batch_remove(keys, True)


def _fields_of(raw: bytes) -> dict[str, Field]:
    try:
        manifest = values.decode(raw)
        found = manifest["format"]
    except (ValueError, TypeError, KeyError):
        raise ReadError("there is no manifest of a batch of this package where the handle says") from None
    if found != _FORMAT:
        raise ReadError(f"a manifest of format {found}, but this version reads {_FORMAT}")
    return {one["name"]: Field(**one) for one in manifest["fields"]}
