"""A flat dictionary as a batch, and back.

Tensors and arrays with a row for each row of the batch are `batch`, lists and arrays of objects of that length
`non_tensor_batch`, and all else is `meta_info`; a schema's section goes before that.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mooncake.structured import values
from mooncake.structured.schemas import Schemas, section_of


def envelope(data: Any, schemas: Schemas) -> dict[str, dict[str, Any]]:
    """The batch that a flat dictionary is.  Raises TypeError for what is none, or a field that has no rows, ValueError
    where it is not clear how many rows there are."""
    if not isinstance(data, Mapping):
        raise TypeError(f"type 'dict' takes a dictionary, not a {type(data).__name__}")
    declared = {name: section_of(name, schemas) for name in data}
    rows = _declared_rows(data, declared)
    guessed = rows == 0  # lists without a section are rows only where no schema says how many there are
    if guessed:
        rows = _guessed_rows(data, declared)
    parts: dict[str, dict[str, Any]] = {"batch": {}, "non_tensor_batch": {}, "meta_info": {}}
    for name, value in data.items():
        section = declared[name]
        if section is None:
            is_rows = guessed and _is_list(value) and len(value) == rows
            is_dense = _is_dense(value) and value.shape[0] == rows
            section = "batch" if is_dense else "non_tensor_batch" if is_rows else "meta_info"
        parts[section][name] = _rows(name, value, rows, schemas) if section == "non_tensor_batch" else value
    return parts


def flattened(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One dictionary of all parts; arrays of objects as lists."""
    result = {**parts["meta_info"], **parts["batch"]}
    for name, value in parts["non_tensor_batch"].items():
        result[name] = value.tolist() if isinstance(value, np.ndarray) and value.dtype.hasobject else value
    return result


def _declared_rows(data: Mapping[str, Any], declared: Mapping[str, str | None]) -> int:
    """How many rows the fields have that a schema puts into a section of rows; 0 if there are none."""
    sizes = {}
    for name, section in declared.items():
        if section in ("batch", "non_tensor_batch"):
            try:
                sizes[name] = len(data[name])
            except TypeError:
                raise ValueError(f"field {name!r} has no rows, but its FieldSchema puts it into {section}") from None
    return _same(sizes, "the fields of a batch must have equally many rows")


def _guessed_rows(data: Mapping[str, Any], declared: Mapping[str, str | None]) -> int:
    """As many as arrays and tensors have or, where there are none, lists."""
    given = {name: value for name, value in data.items() if declared[name] != "meta_info"}
    for kind, wanted in (("arrays", _is_dense), ("lists", _is_list)):
        sizes = {name: len(value) for name, value in given.items() if wanted(value)}
        if sizes:
            hint = (
                "if one of them is no field of the batch, say so by FieldSchema(..., metadata={'section': 'meta_info'})"
            )
            return _same(sizes, f"the {kind} have ambiguous numbers of rows; {hint}")
    return 0


def _same(sizes: Mapping[str, int], otherwise: str) -> int:
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"{otherwise}: {shown}")
    return next(iter(sizes.values()), 0)


def _rows(name: str, value: Any, rows: int, schemas: Schemas) -> Any:
    """A field of non_tensor_batch as it is stored."""
    if not _is_list(value) and not isinstance(value, np.ndarray):
        raise TypeError(f"field {name!r} is {type(value).__name__}: non_tensor_batch takes arrays and lists of rows")
    if len(value) != rows:
        raise ValueError(f"field {name!r} has {len(value)} rows, but the batch has {rows}")
    schema = schemas.get(name)
    if isinstance(value, np.ndarray) and not (value.ndim == 1 and schema is not None and schema.codec == "ndarray"):
        return value
    return list(value)


def _is_list(value: Any) -> bool:
    """Of rows that are no numbers: a list, or an array of objects."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.hasobject
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_dense(value: Any) -> bool:
    plain = values.is_tensor(value) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)
    return plain and value.ndim > 0
