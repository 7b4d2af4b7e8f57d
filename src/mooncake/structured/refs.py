"""Handles of stored batches: which stages there are, where their manifests lie, which field is in which.

A handle is small and may be pickled; an exported one is JSON.  What fields look like only manifests say.
"""

import base64
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mooncake.structured import values

_FORMAT = "mooncake-py/dataproto/1"


class FieldPlace(NamedTuple):
    """`member`: the field's name in the stage's manifest; `section`: batch or non_tensor_batch."""

    stage: str
    member: str
    section: str


@dataclass
class MooncakeDataProtoRef:
    """A batch of `batch_size` rows.  `stage_refs`: keys of the stages' manifests; `meta_info`: what was put with it."""

    stage_refs: dict[str, str]
    field_index: dict[str, FieldPlace]
    batch_size: int
    namespace: str
    partition: str
    meta_info: dict[str, Any] = field(default_factory=dict)
    global_indexes: list[int] | None = None


def export_dataproto_ref(ref: MooncakeDataProtoRef) -> dict[str, Any]:
    """The handle as JSON has it."""
    return {
        "format": _FORMAT,
        "stage_refs": dict(ref.stage_refs),
        "field_index": {name: list(place) for name, place in ref.field_index.items()},
        "batch_size": ref.batch_size,
        "namespace": ref.namespace,
        "partition": ref.partition,
        "meta_info": base64.b64encode(values.encode(ref.meta_info, "meta_info")).decode(),
        "global_indexes": ref.global_indexes,
    }


def import_dataproto_ref(handle: "dict[str, Any] | MooncakeDataProtoRef") -> MooncakeDataProtoRef:
    """The handle of what export_dataproto_ref has made.  Raises ValueError for anything else."""
    if isinstance(handle, MooncakeDataProtoRef):
        return handle
    if not isinstance(handle, dict) or handle.get("format") != _FORMAT:
        raise ValueError("this is no handle: expected a MooncakeDataProtoRef or what export_dataproto_ref made of it")
    return MooncakeDataProtoRef(
        dict(handle["stage_refs"]),
        {name: FieldPlace(*place) for name, place in handle["field_index"].items()},
        handle["batch_size"],
        handle["namespace"],
        handle["partition"],
        values.decode(base64.b64decode(handle["meta_info"])),
        handle["global_indexes"],
    )
