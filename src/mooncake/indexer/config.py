"""The indexer's settings: the JSON file at CONDUCTOR_CONFIG_PATH, and two environment variables."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mooncake.config_text import environment_whole, read_mapping, shown
from mooncake.errors import ConfigError

DEFAULT_PATH = "~/.mooncake/conductor_config.json"
DEFAULT_PORT = 13333
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class Registration(msgspec.Struct, frozen=True):
    """Who publishes KV events, and what they are about.  `block_size` in tokens; an empty `modelname`: any model.
    `endpoint` may be several, separated by commas: those of masters of which one publishes at a time."""

    endpoint: str
    instance_id: str
    block_size: int
    replay_endpoint: str = ""
    type: str = "vLLM"
    modelname: str = ""
    lora_name: str = ""
    tenant_id: str = "default"
    dp_rank: int = 0
    additionalsalt: str = ""

    @property
    def endpoints(self) -> list[str]:
        return [endpoint.strip() for endpoint in self.endpoint.split(",")]

    @property
    def name(self) -> tuple[str, str, int]:
        return self.instance_id, self.tenant_id, self.dp_rank


class IndexerConfig(msgspec.Struct, frozen=True, kw_only=True):
    port: int = DEFAULT_PORT
    most_blocks: int = 1_000_000
    """Blocks of all instances that are remembered, 0.3 KB each."""
    seed: int = 0
    log_level: str = "INFO"
    registrations: tuple[Registration, ...] = ()


def parse_registration(fields: Mapping[str, Any]) -> Registration:
    """Raises ValueError with one sentence."""
    try:
        made = msgspec.convert({name: value for name, value in fields.items() if value is not None}, Registration)
    except (AttributeError, msgspec.ValidationError) as error:
        raise ValueError(f"expected an object with endpoint, instance_id and block_size ({error})") from None
    if not made.instance_id or not made.endpoint:
        raise ValueError("instance_id and endpoint must not be empty")
    if not 0 < made.block_size <= 1 << 20:
        raise ValueError(f"block_size must be a number of tokens from 1 to {1 << 20}, but is {made.block_size}")
    if made.dp_rank < 0:
        raise ValueError(f"dp_rank must not be below 0, but is {made.dp_rank}")
    for field, address in (
        *(("endpoint", endpoint) for endpoint in made.endpoints),
        ("replay_endpoint", made.replay_endpoint),
    ):
        if (address or field == "endpoint") and (not address.startswith(("tcp://", "ipc://")) or "*" in address):
            raise ValueError(f"{field} must be an address to connect to such as tcp://10.0.0.1:5557, but is {address}")
    return made


def read_config(path: str | None = None, port: int | None = None) -> IndexerConfig:
    """What `path`, CONDUCTOR_CONFIG_PATH or the default file says, in this order; that one need not be there."""
    path = path or os.environ.get("CONDUCTOR_CONFIG_PATH", "")
    if not path and Path(DEFAULT_PATH).expanduser().exists():
        path = DEFAULT_PATH
    content = read_mapping(str(Path(path).expanduser()), "indexer's configuration file") if path else {}
    known = {"http_server_port", "kvevent_instance", "max_blocks"}
    if unknown := content.keys() - known:
        raise ConfigError(f"{path}: the field {min(unknown)} is unknown; expected {', '.join(sorted(known))}.")
    return IndexerConfig(
        port=_whole(path, content, "http_server_port", DEFAULT_PORT, 0, 65535) if port is None else port,
        most_blocks=_whole(path, content, "max_blocks", 1_000_000, 1, 1 << 40),
        seed=environment_whole("CONDUCTOR_SEED", 0) & (1 << 64) - 1,
        log_level=_log_level(),
        registrations=tuple(_registrations(path, content.get("kvevent_instance") or {})),
    )


def _registrations(path: str, content: object) -> list[Registration]:
    """A mapping of instance ids to fields, or a list of fields."""
    if isinstance(content, dict):
        content = [
            {"instance_id": name, **fields} if isinstance(fields, dict) else fields for name, fields in content.items()
        ]
    if not isinstance(content, list):
        raise ConfigError(f"{path}: kvevent_instance must map instances to their fields, but is {shown(content)}.")
    made = []
    for fields in content:
        try:
            made.append(parse_registration(fields))
        except ValueError as error:
            raise ConfigError(f"{path}: kvevent_instance {shown(fields)} is wrong: {error}.") from None
    return made


def _whole(path: str, content: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = content.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{path}: {name} must be a whole number from {least} to {most}, but is {shown(value)}.")
    return value


def _log_level() -> str:
    level = os.environ.get("CONDUCTOR_LOG_LEVEL", "").upper() or "INFO"
    level = {"WARN": "WARNING"}.get(level, level)
    if level not in _LOG_LEVELS:
        raise ConfigError(f"environment variable CONDUCTOR_LOG_LEVEL is {level!r}; expected {', '.join(_LOG_LEVELS)}.")
    return level
