"""What a batch is to callers: an object or dictionary with sections of fields, all of equally many rows."""

from collections.abc import Iterable
from typing import Any

from mooncake.structured import schemas
from mooncake.structured.fields import Field
from mooncake.structured.refs import MooncakeDataProtoRef

SECTIONS = ("batch", "non_tensor_batch")
_PARTS = {*SECTIONS, "meta_info"}


def _parts(data: Any) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Fields by section, and metadata."""
    if isinstance(data, dict):
        parts = data if data and set(data) <= _PARTS else {"batch": data}
    else:
        parts = {name: getattr(data, name, None) for name in _PARTS}
        if all(part is None for part in parts.values()):
            raise TypeError(f"a {type(data).__name__} has neither batch nor non_tensor_batch nor meta_info")
    return {section: _items(parts.get(section)) for section in SECTIONS}, _items(parts.get("meta_info"))


def _items(part: Any) -> dict[str, Any]:
    """Of a dictionary, or of what is like one (TensorDict)."""
    return {} if part is None else dict(part.items())


def row_count(fields: list[Field]) -> int | None:
    """Raises ValueError unless all have equally many."""
    counts = {one.name: one.rows for one in fields if one.rows is not None}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(f"the fields of a batch must have equally many rows, but these have: {shown}")
    return next(iter(counts.values()), None)


def made(data_cls: Any, batch: dict[str, Any], non_tensors: dict[str, Any], meta: dict[str, Any]) -> Any:
    if data_cls is None:
        return {"batch": batch, "non_tensor_batch": non_tensors, "meta_info": meta}
    if hasattr(data_cls, "from_dict"):
        return data_cls.from_dict(batch, non_tensors, meta_info=meta)
    return data_cls(batch=batch, non_tensor_batch=non_tensors, meta_info=meta)


def selected(
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


def superseded(ref: MooncakeDataProtoRef, names: set[str], stage: str, overwrite: bool) -> set[str]:
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


def check_type(kind: Any) -> None:
    if kind not in ("dataproto", "dict"):
        raise ValueError(f"the payload type {kind!r} is unsupported: expected 'dataproto' or 'dict'")


def sorted_out(data: Any, field_schemas: schemas.Schemas | None) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Fields by section, and metadata, as their schemas say.  Raises ValueError for those that do not fit."""
    sections, meta = _parts(data)
    if field_schemas:
        schemas.check({**sections, "meta_info": meta}, field_schemas)
        rows = sections["non_tensor_batch"]
        for name in rows:
            rows[name] = schemas.converted(name, rows[name], field_schemas.get(name))
    return sections, meta
