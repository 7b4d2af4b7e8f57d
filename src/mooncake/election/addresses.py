"""The back end that an address of elections names (see `places`)."""

import os
import re
from urllib.parse import parse_qsl

from mooncake.config_text import without_password
from mooncake.election.base import Election
from mooncake.errors import ConfigError
from mooncake.transfer.metadata.backends import members_of

CLUSTER = "MC_STORE_CLUSTER_ID"
DEFAULT_CLUSTER = "mooncake_cluster"

_KUBERNETES_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_EXPECTED = (
    "HOST:PORT, etcd://HOST:PORT[,HOST:PORT], redis://HOST:PORT or k8s://NAMESPACE/LEASE (etcd and redis with "
    "?cluster_id=NAME where the masters' --cluster_id is not the default)"
)


def open_election(text: str, cluster: str = "") -> Election:
    """The elections of `cluster`, if the text does not name another.  Raises ConfigError."""
    address, _, query = text.partition("?")
    scheme, _, rest = address.partition("://")
    options = dict(parse_qsl(query, keep_blank_values=True))
    cluster = options.pop("cluster_id", "") or cluster or os.environ.get(CLUSTER, "") or DEFAULT_CLUSTER
    if options:
        raise ConfigError(
            f"{without_password(text)!r}: {', '.join(options)} means nothing here; expected at most cluster_id=NAME"
        )
    if not cluster.isprintable() or len(cluster) > 200:
        raise ConfigError(f"cluster_id {cluster[:50]!r} is no name; expected up to 200 printable characters")
    match scheme.lower():
        case "etcd":
            members = members_of(re.sub(r"https?://", "", rest), without_password(text))
            if members:
                from mooncake.election.etcd import EtcdElection

                return EtcdElection(members, cluster)
        case "redis" | "rediss":
            from mooncake.election.redis import RedisElection

            return RedisElection(address, cluster)
        case "k8s":
            namespace, _, name = rest.rpartition("/")
            if _KUBERNETES_NAME.fullmatch(name) and (not namespace or _KUBERNETES_NAME.fullmatch(namespace)):
                from mooncake.election.kubernetes import LeaseElection

                return LeaseElection(namespace, name)
    raise ConfigError(f"{without_password(text)!r} does not say where the master is; expected {_EXPECTED}")
