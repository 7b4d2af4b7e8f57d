"""What a user may set: `kv_connector_extra_config`, and the variables that vLLM knows for its own connector."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mooncake.config_text import parse_whole, shown
from mooncake.errors import ConfigError

logger = logging.getLogger("vllm.mooncake")

PORT_VARIABLE = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
LIMIT_VARIABLE = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"
_IN_TREE = frozenset({"device_name"})  # settings of vLLM's own connector, which this one has no use for


def _workers(value: object) -> int:
    return parse_whole(value, 1, 64)


def _protocol(value: object) -> str:
    if not isinstance(value, str) or value.lower() not in ("tcp", "rdma", "cuda"):
        raise ValueError(f"expected tcp or rdma, but found {shown(value)}")
    return value.lower()


def _address(value: object) -> str:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"expected host:port, but found {shown(value)}")
    return f"{host}:{port}"


_PARSERS: dict[str, Callable[[object], Any]] = {
    "num_workers": _workers,
    "mooncake_protocol": _protocol,
    "bootstrap_server_address": _address,
}


@dataclass(frozen=True)
class PushSettings:
    """num_workers                how many threads of prefill copy
    mooncake_protocol          as the transfer engine's; memory of the same host is copied straight with any
    bootstrap_server_address   "host:port" of a registry outside of this instance, "" for its own
    bootstrap_port             of its own registry
    abort_limit                seconds that decode waits for a prompt, and that prefill keeps what nobody fetches
    """

    num_workers: int = 4
    mooncake_protocol: str = "rdma"
    bootstrap_server_address: str = ""
    bootstrap_port: int = 8998
    abort_limit: int = 480

    @staticmethod
    def of(extra: Mapping[str, Any]) -> "PushSettings":
        """Raises ConfigError, with one sentence, for what cannot be used."""
        given: dict[str, Any] = {}
        for name, value in extra.items():
            parse = _PARSERS.get(name)
            if parse is None:
                if name not in _IN_TREE:
                    logger.warning(
                        "kv_connector_extra_config has %s, which is not a setting of mooncake.vllm.MooncakeConnector; "
                        "it is ignored",
                        name,
                    )
                continue
            try:
                given[name] = parse(value)
            except ValueError as error:
                raise ConfigError(f"kv_connector_extra_config is wrong in {name}: {error}.") from None
        port = _variable(PORT_VARIABLE, 8998, 65535)
        return PushSettings(bootstrap_port=port, abort_limit=_variable(LIMIT_VARIABLE, 480, 86400), **given)


def _variable(name: str, default: int, most: int) -> int:
    value = os.environ.get(name)
    if not value:
        return default
    try:
        return parse_whole(value, 1, most)
    except ValueError as error:
        raise ConfigError(f"the variable {name} is wrong: {error}.") from None
