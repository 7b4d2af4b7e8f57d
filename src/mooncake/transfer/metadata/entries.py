"""What is kept in a metadata service: its keys, and JSON that may have been written by anybody.

    mooncake/[CLUSTER/]rpc_meta/NAME    {"ip_or_host_name", "rpc_port"}: where NAME is.  Who has this key has the name
    mooncake/[CLUSTER/]ram/NAME         what its memory is, for those who look

CLUSTER is MC_METADATA_CLUSTER_ID.  Ours add "instance" to the address, a number of that process's life which its port
tells as well: so an address that another process has by now is never taken for it.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from mooncake.errors import MetadataError
from mooncake.transfer.listening import join_host

LONGEST_NAME = 1024  # characters
SHOWN_BUFFERS = 256  # of a process's registered ranges; peers ask the process itself


@dataclass(frozen=True)
class Address:
    """`instance` is 0 where it is not known."""

    host: str
    port: int
    instance: int

    @property
    def text(self) -> str:
        return join_host(self.host, self.port)


def address_key(name: str) -> str:
    return f"{_prefix()}rpc_meta/{_checked(name)}"


def memory_key(name: str) -> str:
    return f"{_prefix()}{_checked(name)}" if "/" in name else f"{_prefix()}ram/{_checked(name)}"


def encode_address(address: Address) -> bytes:
    fields = {"ip_or_host_name": address.host, "rpc_port": address.port, "instance": f"{address.instance:x}"}
    return json.dumps(fields).encode()


def decode_address(name: str, value: bytes) -> Address:
    """Raises MetadataError, with a sentence, for what is no address."""
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        raise _unusable(name, "it is not JSON") from None
    if not isinstance(fields, dict):
        raise _unusable(name, "it is not a JSON object")
    host, port, instance = fields.get("ip_or_host_name"), fields.get("rpc_port"), fields.get("instance", "0")
    if not isinstance(host, str) or not 0 < len(host) <= 255 or any(character.isspace() for character in host):
        raise _unusable(name, "ip_or_host_name must be the name or address of a host")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise _unusable(name, "rpc_port must be a number from 1 to 65535")
    try:
        return Address(host, port, int(instance, 16))
    except (TypeError, ValueError):
        raise _unusable(name, "instance must be a hexadecimal number") from None


def encode_memory(name: str, address: Address, buffers: Sequence[tuple[int, int]], since: float) -> bytes:
    """`buffers`: addresses and lengths; the first SHOWN_BUFFERS are listed.  `since`: seconds of the epoch."""
    fields = {
        "name": name,
        "protocol": "tcp",
        "tcp_data_host": address.host,
        "tcp_data_port": address.port,
        "tcp_proto_version": 2,
        "timestamp": datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%d %H:%M:%S.%f"),
        "rdma_server_name": "",
        "buffers": [{"name": "*", "addr": base, "length": length} for base, length in buffers[:SHOWN_BUFFERS]],
        "devices": [],
        "priority_matrix": {},
    }
    return json.dumps(fields).encode()


def _prefix() -> str:
    cluster = os.environ.get("MC_METADATA_CLUSTER_ID", "").strip("/")
    return f"mooncake/{cluster}/" if cluster else "mooncake/"


def _checked(name: str) -> str:
    if not name or len(name) > LONGEST_NAME:
        raise MetadataError(f"a name has 1 to {LONGEST_NAME} characters, but {name[:20]!r} has {len(name)}")
    return name


def _unusable(name: str, reason: str) -> MetadataError:
    return MetadataError(f"the metadata server's entry of {name!r} cannot be used: {reason}")
