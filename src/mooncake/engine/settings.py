"""What `initialize` is told, and what the environment adds."""

import os
from typing import TYPE_CHECKING

from mooncake.config_text import environment_whole
from mooncake.errors import ConfigError

if TYPE_CHECKING:
    from mooncake.transfer.engine import EngineSettings

SHORTEST_LIMIT = 5  # seconds
_TRUE = ("1", "true", "on", "yes")


def read_settings(local_hostname: str, metadata_server: str, protocol: str) -> "EngineSettings":
    """Raises ConfigError with one sentence for what cannot work."""
    from mooncake.transfer.engine import EngineSettings
    from mooncake.transfer.listening import split_host
    from mooncake.transfer.metadata.backends import is_peer_to_peer

    host, _ = split_host(local_hostname)  # a port in it is part of a name: the engine chooses one to listen on
    if not host:
        raise ConfigError("local_hostname is empty; give the host name or address that other hosts reach this one by")
    metadata = "" if is_peer_to_peer(metadata_server) else metadata_server
    if not metadata_server.strip():
        raise ConfigError("metadata_server is empty; use 'P2PHANDSHAKE', which needs no metadata service")
    if protocol.lower() == "xgmi":
        raise ConfigError("protocol 'xgmi' is not supported; use 'tcp'")
    low = environment_whole("MC_MIN_RPC_PORT", environment_whole("MC_MIN_PRC_PORT", 15000))
    high = environment_whole("MC_MAX_RPC_PORT", 17000)
    if not 0 < low <= high < 65536:
        raise ConfigError(f"MC_MIN_RPC_PORT..MC_MAX_RPC_PORT is {low}..{high}; expected ports, the lower one first")
    return EngineSettings(
        host=host,
        name=local_hostname.strip() if metadata else "",
        metadata=metadata,
        limit=float(max(SHORTEST_LIMIT, environment_whole("MC_TRANSFER_TIMEOUT", 30))),
        min_port=low,
        max_port=high,
        bind_address=os.environ.get("MC_TCP_BIND_ADDRESS", ""),
        force_tcp=os.environ.get("MC_FORCE_TCP", "").lower() in _TRUE,
    )
