"""The client's configuration: one dataclass, read from a JSON file or from the environment.

A wrong or incomplete configuration is told in one sentence (`errors.ConfigError`, a ValueError): where it stands,
which field, what was expected.  The files are shared with other programs, so fields of others are left alone.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from mooncake.config_text import parse_bool, parse_size, parse_whole, read_mapping, shown
from mooncake.errors import ConfigError

DEFAULT_GLOBAL_SEGMENT_SIZE = 3355443200
DEFAULT_LOCAL_BUFFER_SIZE = 1073741824

# fmt: off
_KNOWN_PROTOCOLS = frozenset((
    "tcp", "rdma", "efa", "nvmeof", "nvlink", "nvlink_intra", "musa", "hip", "barex", "cxl", "ascend", "ub", "ubshmem",
    "maca", "sunrise_link", "rpc_only",
))
# fmt: on
_ENVIRONMENT = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": "MOONCAKE_MASTER",
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
    "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
}
_ENVIRONMENT_DEFAULTS = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
_REQUIRED_IN_FILE = {  # and what it may look like
    "local_hostname": '"127.0.0.1", the address by which other hosts reach this one',
    "metadata_server": '"P2PHANDSHAKE" or "http://127.0.0.1:8080/metadata"',
    "master_server_address": '"127.0.0.1:50051", the address of mooncake_master',
}

logger = logging.getLogger(__name__)


def _parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, but found {shown(value)}")
    return value


def _parse_filled_text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected text that is not empty, but found {shown(value)}")
    return value.strip()


def _parse_protocol(value: object) -> str:
    return _parse_filled_text(value).lower()


def _parse_port(value: object) -> int:
    return parse_whole(value, 0, 65535)


_PARSERS: dict[str, Callable[[object], Any]] = {
    "local_hostname": _parse_filled_text,
    "metadata_server": _parse_filled_text,
    "global_segment_size": parse_size,
    "local_buffer_size": parse_size,
    "protocol": _parse_protocol,
    "device_name": _parse_text,
    "master_server_address": _parse_filled_text,
    "enable_ssd_offload": parse_bool,
    "ssd_offload_path": _parse_text,
    "tenant_id": _parse_filled_text,
    "enable_client_http_server": parse_bool,
    "client_http_port": _parse_port,
}


@dataclass
class MooncakeConfig:
    """What a client needs to join a pool.

    Sizes are bytes; text such as "4gb" is accepted and becomes a number.  `protocol` becomes lower case.
    Raises ConfigError (a ValueError) when a value cannot be used.
    """

    local_hostname: str
    metadata_server: str
    global_segment_size: int = DEFAULT_GLOBAL_SEGMENT_SIZE
    local_buffer_size: int = DEFAULT_LOCAL_BUFFER_SIZE
    protocol: str = "tcp"
    device_name: str | None = ""
    master_server_address: str = ""
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "device_name":
                continue
            try:
                setattr(self, field.name, _PARSERS[field.name](value))
            except ValueError as error:
                raise ConfigError(f"The Mooncake configuration is wrong in {field.name}: {error}.") from None
        if self.protocol not in _KNOWN_PROTOCOLS:
            logger.warning("The protocol %s is not known; it is passed on as it is.", self.protocol)

    @staticmethod
    def from_file(file_path: str) -> "MooncakeConfig":
        """Read a JSON (or YAML) file; null means the field's default."""
        path = os.fspath(file_path)
        content = read_mapping(path, "Mooncake configuration file")
        given = {name: content[name] for name in _PARSERS if content.get(name) is not None}
        for name, example in _REQUIRED_IN_FILE.items():
            if name not in given:
                raise ConfigError(
                    f"The Mooncake configuration file {path} lacks the field {name}: expected text that is not empty, "
                    f"such as {example}."
                )
        return _build(given, lambda name: f"The Mooncake configuration file {path} is wrong in {name}")

    @staticmethod
    def load_from_env() -> "MooncakeConfig":
        """The file that MOONCAKE_CONFIG_PATH names decides everything; without it the MOONCAKE_... variables
        do, of which MOONCAKE_MASTER must be there.  An empty variable counts as not set."""
        path = os.environ.get("MOONCAKE_CONFIG_PATH")
        if path:
            if not os.path.exists(path):
                raise ConfigError(
                    f"MOONCAKE_CONFIG_PATH is {path}, which cannot be read: No such file or directory; let it name the "
                    "pool's JSON file, or unset it and set MOONCAKE_MASTER."
                )
            return MooncakeConfig.from_file(path)
        if not os.environ.get("MOONCAKE_MASTER"):
            raise ConfigError(
                "Neither the environment variable 'MOONCAKE_CONFIG_PATH' (a JSON file) nor 'MOONCAKE_MASTER' "
                "(the master's host:port) is set; set one of them."
            )
        given: dict[str, object] = dict(_ENVIRONMENT_DEFAULTS)
        given |= {name: os.environ[variable] for name, variable in _ENVIRONMENT.items() if os.environ.get(variable)}
        return _build(given, lambda name: f"The environment variable {_ENVIRONMENT[name]} is wrong")


def _build(given: dict[str, object], wrong: Callable[[str], str]) -> MooncakeConfig:
    """A configuration of `given` values; `wrong(field)` starts the sentence about one that cannot be used."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        try:
            values[name] = _PARSERS[name](value)
        except ValueError as error:
            raise ConfigError(f"{wrong(name)}: {error}.") from None
    return MooncakeConfig(**values)
