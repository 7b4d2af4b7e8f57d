"""What a user may set: the pool's file (MOONCAKE_CONFIG_PATH) and `kv_connector_extra_config`."""

import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mooncake.config_text import parse_bool, parse_whole, read_mapping, shown
from mooncake.errors import ConfigError
from mooncake.mooncake_config import MooncakeConfig

logger = logging.getLogger("vllm.mooncake")

_DEFAULT_SEGMENT_SIZE = 4 << 30
_DEFAULT_BUFFER_SIZE = 64 << 20
_MODES = ("embedded", "standalone-store")
_POOL_FIELDS = ("metadata_server", "master_server_address", "protocol", "device_name", "tenant_id")
_IN_TREE = frozenset({
    "lookup_rpc_port", "lookup_async", "load_async", "enable_lookup", "mooncake_rpc_port", "store_tp_size",
    "enable_store_tp_lcm", "prefill_tp_sizes", "custom_mem_pool", "preferred_segment", "enable_group_semantics",
    "enable_cross_layers_blocks", "mooncake_protocol",
})  # fmt: skip  # settings of vLLM's own connector, which this one has no use for


def read_pool_config() -> MooncakeConfig:
    """The pool that MOONCAKE_CONFIG_PATH describes, or the MOONCAKE_... variables without it.

    `local_hostname` is MOONCAKE_REQUESTER_LOCAL_HOSTNAME, the file's, VLLM_HOST_IP or this host's name, in this order.
    Raises ConfigError.
    """
    path = os.environ.get("MOONCAKE_CONFIG_PATH")
    if not path:
        config = MooncakeConfig.load_from_env()
    else:
        content = read_mapping(path, "Mooncake configuration file")
        mode = content.get("mode", _MODES[0])
        if mode not in _MODES:
            raise ConfigError(
                f"The Mooncake configuration file {path} is wrong in mode: expected one of {', '.join(_MODES)}, but "
                f"found {shown(mode)}."
            )
        if not content.get("master_server_address"):
            raise ConfigError(
                f"The Mooncake configuration file {path} lacks the field master_server_address: expected the address "
                'of mooncake_master, such as "127.0.0.1:50051".'
            )
        given = {name: content[name] for name in _POOL_FIELDS if content.get(name) is not None}
        given.setdefault("metadata_server", "P2PHANDSHAKE")
        default = _DEFAULT_SEGMENT_SIZE if mode == "embedded" else 0
        config = MooncakeConfig(
            local_hostname=content.get("local_hostname") or socket.gethostname(),
            global_segment_size=content.get("global_segment_size", default),
            local_buffer_size=content.get("local_buffer_size", _DEFAULT_BUFFER_SIZE),
            **given,
        )
        if bool(config.global_segment_size) != (mode == "embedded"):
            raise ConfigError(
                f"The Mooncake configuration file {path} is wrong in global_segment_size: mode {mode} needs "
                f"{'more than 0' if mode == 'embedded' else '0'}, but found {config.global_segment_size}."
            )
    host = os.environ.get("MOONCAKE_REQUESTER_LOCAL_HOSTNAME") or ""
    if not host and not (path and content.get("local_hostname")):
        host = os.environ.get("VLLM_HOST_IP") or ""
    if host:
        config.local_hostname = host
    return config


def _whole(least: int, most: int) -> Callable[[object], int]:
    return lambda value: parse_whole(value, least, most)


def _text(value: object) -> str:
    if not isinstance(value, str) or "/" in value or len(value) > 100:
        raise ValueError(f"expected text without / of at most 100 characters, but found {shown(value)}")
    return value


_PARSERS: dict[str, Callable[[object], Any]] = {
    "lookup_budget_ms": _whole(0, 60_000),
    "save_decode_cache": parse_bool,
    "max_pinned_percent": _whole(1, 90),
    "decline_slow_loads": parse_bool,
    "cache_prefix": _text,
    "weights_id": _text,
    "shared_tp": _whole(0, 1024),
}


@dataclass(frozen=True)
class Settings:
    """`kv_connector_extra_config`, as far as this connector knows it.

    lookup_budget_ms     how long a new request waits at most for the master to say what the pool has of it
    save_decode_cache    also save blocks that are filled while answering, so that a next turn hits
    max_pinned_percent   of the KV cache's blocks may wait to be saved; further ones are not saved
    decline_slow_loads   compute what would take longer to load, by what both took lately
    cache_prefix         keeps apart what would be shared
    weights_id           names the weights, instead of a fingerprint of their files
    shared_tp            the largest tensor parallel size of the instances that share; 0: only those of the same size do
    """

    lookup_budget_ms: int = 50
    save_decode_cache: bool = False
    max_pinned_percent: int = 40
    decline_slow_loads: bool = True
    cache_prefix: str = ""
    weights_id: str = ""
    shared_tp: int = 0

    @staticmethod
    def of(extra: Mapping[str, Any]) -> "Settings":
        """Raises ConfigError, with one sentence, for what cannot be used."""
        given = {}
        for name, value in extra.items():
            parse = _PARSERS.get(name)
            if parse is None:
                if name not in _IN_TREE:
                    logger.warning(
                        "kv_connector_extra_config has %s, which is not a setting of mooncake.vllm; it is ignored", name
                    )
                continue
            try:
                given[name] = parse(value)
            except ValueError as error:
                raise ConfigError(f"kv_connector_extra_config is wrong in {name}: {error}.") from None
        return Settings(**given)
