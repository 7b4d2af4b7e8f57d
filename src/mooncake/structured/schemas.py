"""What callers say about fields of a batch before they are stored.

There is one encoding of rows here, which keeps every type (values.py): a schema's codec is checked to be one that
exists, and says only which numbers its "dtype" is for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mooncake.structured import values

SECTIONS = ("batch", "non_tensor_batch", "meta_info")
CODECS = (
    "auto",
    "ragged_tensor_dict",
    "ragged_tensor",
    "typed_ragged",
    "utf8_ragged",
    "msgpack_ragged",
    "json_ragged",
    "bytes_ragged",
    "ndarray",
)


@dataclass(frozen=True)
class FieldSchema:
    """`codec`: one of CODECS; `nullable`: whether rows may be None; `metadata`: "section" (batch, non_tensor_batch or
    meta_info) is where the field belongs, and "dtype" the element type of numbers.  Checked when it is used."""

    codec: str
    nullable: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)


Schemas = Mapping[str, FieldSchema]


def section_of(name: str, schemas: Schemas) -> str | None:
    """The section that a field is declared to be in, if any.  Raises ValueError for a section or codec that is not."""
    schema = schemas.get(name)
    if schema is None:
        return None
    if schema.codec not in CODECS:
        raise ValueError(
            f"the FieldSchema of {name!r} has the codec {schema.codec!r}: expected one of {', '.join(CODECS)}"
        )
    section = schema.metadata.get("section")
    if section is not None and section not in SECTIONS:
        raise ValueError(f"the FieldSchema of {name!r} has the section {section!r}: expected {', '.join(SECTIONS)}")
    return section


def check(sections: Mapping[str, Mapping[str, Any]], schemas: Schemas) -> None:
    """Raises ValueError for a field in another section than its schema says, or a row of None that it forbids."""
    for section, fields in sections.items():
        for name, value in fields.items():
            declared = section_of(name, schemas)
            if declared not in (None, section):
                raise ValueError(f"the FieldSchema of {name!r} says {declared}, but the data has it in {section}")
            if section == "non_tensor_batch" and name in schemas and not schemas[name].nullable:
                _check_rows(name, value)


def converted(name: str, value: Any, schema: FieldSchema | None) -> Any:
    """A field of non_tensor_batch whose schema names an element type: numbers of the codec ndarray, and arrays and
    lists of numbers of typed_ragged, are of that type.  Raises ValueError for a row that cannot be."""
    dtype = None if schema is None else _number_type(schema)
    if schema is None or dtype is None or schema.codec not in ("ndarray", "typed_ragged"):
        return value
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.astype(dtype) if schema.codec == "ndarray" else value
    if not isinstance(value, list | tuple | np.ndarray) or (isinstance(value, np.ndarray) and value.ndim != 1):
        return value
    rows = [_row(f"row {number} of field {name!r}", row, schema.codec, dtype) for number, row in enumerate(value)]
    if not isinstance(value, np.ndarray):
        return rows
    objects = np.empty(len(rows), object)
    for number, row in enumerate(rows):  # an assignment of the whole would look into lists
        objects[number] = row
    return objects


def _number_type(schema: FieldSchema) -> np.dtype[Any] | None:
    """The element type that a schema names, if it is one of numbers or truth."""
    try:
        dtype: np.dtype[Any] = np.dtype(schema.metadata["dtype"])
    except (KeyError, TypeError, ValueError):
        return None
    return dtype if dtype.kind in "biufc" else None


def _row(what: str, row: Any, codec: str, dtype: np.dtype[Any]) -> Any:
    if row is None or values.is_tensor(row):
        return row
    try:
        if codec == "ndarray":
            return np.asarray(row).astype(dtype).item()
        if isinstance(row, np.ndarray):
            return row.astype(dtype)
        return np.asarray(row, dtype).tolist()
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what} cannot be {dtype}, which its FieldSchema says: {error}") from None


def _check_rows(name: str, value: Any) -> None:
    is_rows = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype.hasobject)
    rows = value if is_rows else ()
    for number, row in enumerate(rows):
        if row is None:
            raise ValueError(f"row {number} of field {name!r} is None, which its FieldSchema forbids (nullable=False)")
