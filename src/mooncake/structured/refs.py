"""Handles of what is stored: of bundles, and of batches (which stages there are, where their manifests lie, which field
is in which).

A handle is small and may be pickled; an exported one is JSON.  What fields look like only manifests say.
"""

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mooncake.structured import values

_TYPE, _VERSION, _KIND = "mooncake_dataproto_ref", 1, "bundle_stages"
_SECTIONS = ("batch", "non_tensor_batch")


@dataclass
class RemoteBundleRef:
    """A bundle in the pool.  `manifest`: what lies at `manifest_key`, or empty if it is to be read there."""

    manifest_key: str
    manifest: dict[str, Any]


@dataclass(frozen=True)
class StructuredFieldLocation:
    """`member`: the field's name in the stage's manifest; `section`: batch or non_tensor_batch."""

    stage: str
    member: str
    section: str


@dataclass
class MooncakeDataProtoRef:
    """A batch of `batch_size` rows.  `stage_refs`: where stages' manifests lie; `meta_info`: what was put with it."""

    batch_size: int
    stage_refs: dict[str, RemoteBundleRef]
    field_index: dict[str, StructuredFieldLocation]
    meta_info: dict[str, Any] = field(default_factory=dict)
    namespace: str = "default"
    partition: str = "default"
    global_indexes: list[int] | None = None


def is_dataproto_ref_handle(value: Any) -> bool:
    """Whether it is of the kind that export_dataproto_ref makes."""
    return isinstance(value, Mapping) and value.get("type") == _TYPE


def export_dataproto_ref(ref: MooncakeDataProtoRef) -> dict[str, Any]:
    """The handle as JSON has it.  Raises TypeError for anything but a MooncakeDataProtoRef."""
    if not isinstance(ref, MooncakeDataProtoRef):
        raise TypeError(f"expected a MooncakeDataProtoRef, not {type(ref).__name__}")
    plain = {name: value for name, value in ref.meta_info.items() if _is_json(name) and _is_json(value)}
    other = {name: value for name, value in ref.meta_info.items() if name not in plain}
    handle = {
        "type": _TYPE,
        "version": _VERSION,
        "kind": _KIND,
        "batch_size": ref.batch_size,
        "namespace": ref.namespace,
        "partition": ref.partition,
        "global_indexes": ref.global_indexes,
        "stage_refs": {stage: {"manifest_key": one.manifest_key} for stage, one in ref.stage_refs.items()},
        "field_index": {
            name: {"stage": place.stage, "member": place.member, "section": place.section}
            for name, place in ref.field_index.items()
        },
        "meta_info": plain,
    }
    if other:
        handle["meta_info_encoded"] = base64.b64encode(values.encode(other, "meta_info")).decode()
    return handle


def import_dataproto_ref(handle: Mapping[str, Any] | MooncakeDataProtoRef) -> MooncakeDataProtoRef:
    """The handle of what export_dataproto_ref has made.  Raises ValueError for anything else."""
    if isinstance(handle, MooncakeDataProtoRef):
        return handle
    if not is_dataproto_ref_handle(handle):
        raise ValueError("this is no handle: expected a MooncakeDataProtoRef or what export_dataproto_ref made of it")
    for name, known in (("version", _VERSION), ("kind", _KIND)):
        if handle.get(name) != known:
            raise ValueError(f"a handle of unsupported {name} {handle.get(name)!r}: expected {known!r}")
    stages = {stage: _stage(stage, one) for stage, one in _mapping(handle, "stage_refs").items()}
    fields = {name: _place(name, one, stages) for name, one in _mapping(handle, "field_index").items()}
    meta = dict(_mapping(handle, "meta_info") if "meta_info" in handle else {})
    if "meta_info_encoded" in handle:
        meta |= values.decode(base64.b64decode(handle["meta_info_encoded"]))
    return MooncakeDataProtoRef(
        _number(handle.get("batch_size"), "batch_size"),
        stages,
        fields,
        meta,
        str(handle.get("namespace", "default")),
        str(handle.get("partition", "default")),
        _indexes(handle.get("global_indexes")),
    )


def _stage(stage: Any, one: Any) -> RemoteBundleRef:
    key = one.get("manifest_key") if isinstance(one, Mapping) else None
    if not isinstance(stage, str) or not isinstance(key, str):
        raise ValueError(f"the handle's stage {stage!r} has no manifest_key that is a string")
    return RemoteBundleRef(key, {})


def _place(name: Any, one: Any, stages: Mapping[str, RemoteBundleRef]) -> StructuredFieldLocation:
    place = one if isinstance(one, Mapping) else {}
    stage, member, section = place.get("stage"), place.get("member"), place.get("section")
    if not isinstance(name, str) or not isinstance(member, str):
        raise ValueError(f"the handle does not say which member the field {name!r} is")
    if stage not in stages:
        raise ValueError(f"the handle's field {name!r} is of stage {stage!r}, which the handle does not have")
    if section not in _SECTIONS:
        raise ValueError(f"the handle's field {name!r} is in section {section!r}: expected batch or non_tensor_batch")
    return StructuredFieldLocation(str(stage), member, str(section))


def _mapping(handle: Mapping[str, Any], name: str) -> Mapping[Any, Any]:
    value = handle.get(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"the handle's {name} must be a mapping, not {type(value).__name__}")
    return value


def _number(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"the handle's {name} must be a whole number, not {value!r}")
    return value


def _indexes(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError(f"the handle's global_indexes must be a list, not {type(value).__name__}")
    return [_number(index, "global_indexes") for index in value]


def _is_json(value: Any) -> bool:
    """Whether JSON gives back exactly the same."""
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    if kind is list:
        return all(_is_json(item) for item in value)
    if kind is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    return value is None or kind in (bool, int, str)
