"""What the flags say about elections: which back end, and the address under which this master is found."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping

from mooncake.config_text import shown
from mooncake.errors import ConfigError
from mooncake.master.flag_table import Value
from mooncake.transfer.listening import join_host

_SCHEMES = {"etcd": ("etcd",), "redis": ("redis", "rediss"), "k8s": ("k8s",)}
_EXAMPLES = {"etcd": "10.0.0.1:2379;10.0.0.2:2379", "redis": "redis://10.0.0.1:6379"}
_ANYWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # for documentation: nothing is sent there
_EVERY_ADDRESS = ("0.0.0.0", "::", "")


def election_text(values: Mapping[str, Value]) -> str:
    """What clients may be given as the master's address, but for the cluster's name.  Raises ConfigError."""
    kind, where = str(values["ha_backend_type"]), str(values["ha_backend_connstring"])
    endpoints = str(values["etcd_endpoints"])
    if endpoints and kind != "etcd":
        raise ConfigError(f"--etcd_endpoints={endpoints} contradicts --ha_backend_type={kind}; give one of them.")
    if where and endpoints and where != endpoints:
        raise ConfigError(
            f"--ha_backend_connstring={where} and --etcd_endpoints={endpoints} contradict each other; give one of them."
        )
    where = where or endpoints
    scheme, separator, rest = where.partition("://")
    if separator and kind == "etcd" and scheme in ("http", "https"):
        separator, rest = "", where
    if separator and scheme not in _SCHEMES[kind]:
        raise ConfigError(f"--ha_backend_connstring={shown(where)} contradicts --ha_backend_type={kind}.")
    if kind == "k8s":
        return f"k8s://{_lease(rest if separator else where, values)}"
    if not where:
        also = " (or --etcd_endpoints)" if kind == "etcd" else ""
        raise ConfigError(
            f"--enable_ha needs the address of {kind}: give --ha_backend_connstring={_EXAMPLES[kind]}{also}, say."
        )
    return where if separator else f"{kind}://{where}"


def _lease(text: str, values: Mapping[str, Value]) -> str:
    """NAMESPACE/LEASE; by default the pod's namespace, and the cluster's name as far as Kubernetes has such names."""
    namespace, _, name = text.rpartition("/")
    name = name or re.sub(r"[^a-z0-9-]+", "-", str(values["cluster_id"]).lower()).strip("-")
    return f"{namespace or values['pod_namespace']}/{name}"


def published_address(host: str, port: int, values: Mapping[str, Value]) -> str:
    """host:port by which others reach a master that listens on `host`.  Raises ConfigError if there is none."""
    if host not in _EVERY_ADDRESS:
        return join_host(host, port)
    families = (socket.AF_INET6, socket.AF_INET) if host == "::" else (socket.AF_INET,)
    for target in (*re.findall(r"[\w.-]*[a-zA-Z0-9](?=:\d)", election_text(values)), ""):
        for family in families:
            found = _address_towards(target or _ANYWHERE[family], family)
            if found:
                return join_host(found, port)
    raise ConfigError(
        f"--rpc_address={host} with --enable_ha: this host has no address by which others reach it, and that one is "
        "not to be published; give --rpc_address=ADDRESS, or --rpc_interface."
    )


def _address_towards(host: str, family: socket.AddressFamily) -> str:
    """The address that this host uses towards `host`; empty if that is none for others."""
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((host, 9))
            found = str(sock.getsockname()[0])
        except OSError:
            return ""
    address = ipaddress.ip_address(found.partition("%")[0])
    return "" if address.is_loopback or address.is_link_local or address.is_unspecified else found
