"""How settings are spelled in text: sizes, truth values, durations, ports, and JSON or YAML files.

Shared by the master's flags and config file, by `mooncake_config` and by the client's commands.  A value that
cannot be understood raises ValueError whose text starts with "expected ..."; who calls knows the name of the field
and makes the sentence for the user out of both (`errors.ConfigError`).
"""

import json
import os
import re
from typing import Any

from mooncake.errors import ConfigError

TRUE_WORDS = frozenset({"true", "t", "1", "yes", "y", "on", "enable"})
FALSE_WORDS = frozenset({"false", "f", "0", "no", "n", "off", "disable"})

_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE | re.ASCII)
_SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATION = re.compile(r"(\d+)\s*(ms|s|m|h)?", re.ASCII)
_DURATION_UNITS_MS = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_STRING_OR_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])')


def parse_size(value: object) -> int:
    """Bytes: a whole number, or text as "4096", "64MB", "1.5 gb" (units b, k, kb, m, mb, g, gb, t, tb are
    powers of 1024, in any case)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, float) and value >= 0 and value.is_integer():
        return int(value)
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match:
            number, unit = match[1], _SIZE_UNITS[(match[2] or "").lower()]
            return int(number) * unit if number.isdigit() else int(float(number) * unit)
    raise ValueError(f'expected a size in bytes, a number or text such as "64MB" or "1.5 GB", but found {shown(value)}')


def parse_bool(value: object) -> bool:
    """A JSON truth value, 0 or 1, or one of the usual words."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError(f"expected true or false, but found {shown(value)}")


def parse_duration_ms(value: object) -> int:
    """Milliseconds: a whole number, or text as "10000", "500ms", "10s", "5m", "1h"."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        if match:
            return int(match[1]) * _DURATION_UNITS_MS[match[2] or ""]
    raise ValueError(
        f"expected milliseconds or a whole number with ms, s, m or h such as 10s, but found {shown(value)}"
    )


def parse_whole(value: object, least: int, most: int) -> int:
    """A whole number in a range, as a number or as decimal text."""
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value.strip(), re.ASCII):
        number = int(value)
    if number is None or not least <= number <= most:
        raise ValueError(f"expected a whole number from {least} to {most}, but found {shown(value)}")
    return number


def environment_whole(name: str, default: int) -> int:
    """The whole number that an environment variable holds; `default` if it is unset or empty."""
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name} is {text!r}; expected a whole number") from None


def environment_truth(name: str, default: bool) -> bool:
    """Whether an environment variable is true; `default` if it is unset or empty."""
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return parse_bool(text)
    except ValueError as error:
        raise ConfigError(f"environment variable {name}: {error}") from None


def shown(value: object) -> str:
    """A value as the user wrote it, cut short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def read_mapping(path: str, what: str) -> dict[str, Any]:
    """The top-level mapping of a JSON or YAML file (YAML when the name ends in .yaml or .yml).

    `what` says what the file is for, e.g. "master configuration file".  Raises ConfigError with one sentence when
    it cannot be read or is no mapping.
    """
    where = f"{what} {path}"
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except UnicodeDecodeError:
        raise ConfigError(f"The {where} cannot be read: it is not UTF-8 text.") from None
    except OSError as error:
        raise ConfigError(f"The {where} cannot be read: {error.strerror or error}.") from None
    try:
        content = _parse_yaml(text) if path.endswith((".yaml", ".yml")) else _parse_json(text)
    except ValueError as error:
        raise ConfigError(f"The {where} cannot be understood: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"The {where} must hold one mapping of names to values, but holds {shown(content)}.")
    return {str(name): value for name, value in content.items()}


def _parse_json(text: str) -> object:
    """JSON in which a comma may follow the last item, as published examples have it."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        # Blanks keep the line and column numbers of later mistakes right.
        return json.loads(_STRING_OR_TRAILING_COMMA.sub(lambda match: match[1] or " ", text))
    except json.JSONDecodeError as error:
        message = error.msg[:1].lower() + error.msg[1:]
        raise ValueError(f"{message} at line {error.lineno}, column {error.colno}") from None


def _parse_yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{error.problem or 'it is not YAML'}{at}") from None
    except yaml.YAMLError:
        raise ValueError("it is not YAML") from None


def without_password(address: str) -> str:
    """An address with scheme and password as messages may show it."""
    return re.sub(r"(://[^/@]*):[^/]*@", r"\1:***@", address)[:200]
