"""The master's configuration file: JSON or YAML, one flat mapping with the flags' names.

Values must have the flag's own type (a duration may be a number of milliseconds or text).  Every mistake is one
sentence that names file, field and what was expected.
"""

from mooncake.config_text import parse_duration_ms, read_mapping, shown
from mooncake.errors import ConfigError
from mooncake.master.flag_table import FLAGS, Flag, Kind, Value

_BY_FIELD: dict[str, Flag] = {flag.field: flag for flag in FLAGS if flag.in_file}


def read_config_file(path: str) -> dict[str, Value]:
    """The values that the file sets, by the flags' names.  Raises ConfigError."""
    values: dict[str, Value] = {}
    for field, value in read_mapping(path, "master configuration file").items():
        flag = _BY_FIELD.get(field)
        if flag is None:
            raise ConfigError(_unknown(path, field))
        try:
            values[flag.name] = _typed(flag, value)
        except ValueError as error:
            raise ConfigError(f"The master configuration file {path} is wrong in the field {field}: {error}.") from None
    return values


def _typed(flag: Flag, value: object) -> Value:
    if flag.kind is Kind.DURATION:
        return flag.check(parse_duration_ms(value))
    if flag.kind is Kind.BOOL:
        fits = isinstance(value, bool)
    elif flag.kind is Kind.STRING:
        fits = isinstance(value, str)
    elif flag.kind is Kind.DOUBLE:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = isinstance(value, int) and not isinstance(value, bool)
    if not fits or not isinstance(value, bool | int | float | str):
        raise ValueError(f"expected {flag.wanted}, but found {shown(value)}")
    return flag.check(float(value) if flag.kind is Kind.DOUBLE else value)


def _unknown(path: str, field: str) -> str:
    from difflib import get_close_matches

    renamed = {flag.name: flag.field for flag in FLAGS if flag.in_file and flag.field != flag.name}
    similar = [renamed[field]] if field in renamed else get_close_matches(field, _BY_FIELD, n=1)
    hint = f", did you mean {similar[0]}?" if similar else ", see mooncake_master --help for those that exist."
    return f"The master configuration file {path} has an unknown field {field}{hint}"
