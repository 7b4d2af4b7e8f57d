"""What a text names as the master: one address, or a back end of elections that knows who leads.

HOST:PORT                                                  one master
etcd://HOST:PORT[,HOST:PORT][?cluster_id=NAME]
redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE][?cluster_id=NAME]   (or rediss)
k8s://NAMESPACE/LEASE
"""

import os
import re
import threading
import time
from urllib.parse import parse_qsl

from mooncake.config_text import without_password
from mooncake.election.base import LEASE_S, Election, View
from mooncake.errors import ConfigError, MetadataError
from mooncake.rpc.place import MasterPlace, parse_address
from mooncake.transfer.metadata.backends import members_of
from mooncake.transfer.metadata.limits import call_within

CLUSTER = "MC_STORE_CLUSTER_ID"
DEFAULT_CLUSTER = "mooncake_cluster"

_FIND_S = 1.0  # seconds that a look may take
_FRESH_S = 0.5  # and what it found is good for
_KUBERNETES_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_EXPECTED = (
    "HOST:PORT, etcd://HOST:PORT[,HOST:PORT], redis://HOST:PORT or k8s://NAMESPACE/LEASE (the first three of those "
    "with ?cluster_id=NAME where the masters' --cluster_id is not the default)"
)


def master_place(text: str) -> MasterPlace:
    """Raises ConfigError, with a sentence; connects to nothing."""
    if "://" in text:
        return LeaderPlace(text.strip())
    try:
        return MasterPlace(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


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


class LeaderPlace(MasterPlace):
    """Wherever the leader is.  Thread-safe."""

    wait_s = 2 * LEASE_S

    def __init__(self, text: str) -> None:
        self.text = without_password(text)
        self._text = text
        self._election = open_election(text)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._term = 0  # the highest one seen
        self._lower_since = 0.0
        self._view: View | None = None  # by the last look that succeeded
        self._problem = ""  # of the last look
        self._looked = 0.0

    def find(self) -> tuple[str, int]:
        with self._lock:
            if time.monotonic() - self._looked > _FRESH_S:
                self._look()
                self._looked = time.monotonic()
            if self._view is None:
                raise ConnectionRefusedError(self._problem)
            return parse_address(self._view.address)

    def accept(self, term: int) -> None:
        with self._lock:
            if term < self._term:
                raise ConnectionRefusedError(f"the master there has term {term}; one of term {self._term} is known")
            self._term = term

    def unreachable(self, error: Exception) -> str:
        return f"no leading master is reached by {self.text}: {getattr(error, 'strerror', None) or error}"

    def _look(self) -> None:
        if self._owner != os.getpid():  # a forked child must not use the connections of its parent
            self._owner, self._election = os.getpid(), open_election(self._text)
        try:
            view = call_within(_FIND_S, self._election.look)
            if view is not None:
                parse_address(view.address)
        except (MetadataError, TimeoutError, ValueError) as error:
            self._problem = str(error)  # whoever led may lead still
            return
        self._view = view
        if view is None:
            self._problem = "nobody leads now; is a mooncake_master with --enable_ha running for this cluster?"
        else:
            self._count(view.term)

    def _count(self, term: int) -> None:
        """A lower term than before, for long, is that of a back end that has lost its memory."""
        if term >= self._term:
            self._term, self._lower_since = term, 0.0
        elif not self._lower_since:
            self._lower_since = time.monotonic()
        elif time.monotonic() - self._lower_since > 2 * LEASE_S:
            self._term, self._lower_since = term, 0.0
