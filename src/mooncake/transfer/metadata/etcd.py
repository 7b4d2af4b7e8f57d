"""etcd 3 through its JSON gateway, with etcd3gw: the optional extra mooncake-py[etcd].

Our keys hang on one lease a client, so they go when their process is gone.  Keeping a lease alive writes nothing.
"""

import threading
from base64 import b64encode
from collections.abc import Callable
from typing import TypeVar

from mooncake.errors import ConfigError, MetadataError
from mooncake.transfer.metadata.base import LARGEST_VALUE, MetadataBackend

try:
    from etcd3gw import Etcd3Client
    from etcd3gw.exceptions import ConnectionFailedError, ConnectionTimeoutError, Etcd3Exception
    from etcd3gw.lease import Lease
except ImportError:
    raise ConfigError(
        "an etcd metadata server needs the package etcd3gw: pip install 'mooncake-py[etcd]' "
        "(or use http://, redis:// or P2PHANDSHAKE)"
    ) from None

MEMBER_LIMIT = 1.5  # seconds a member of the cluster may take
_BROKEN = (Etcd3Exception, OSError, ValueError, LookupError)  # requests' exceptions are OSErrors
_LEASE_GONE = "lease not found"
_Result = TypeVar("_Result")


class EtcdBackend(MetadataBackend):
    """Several members may be named: one that does not answer is asked last the next time."""

    def __init__(self, members: list[tuple[str, int]], ttl: float) -> None:
        """Connects to nothing yet."""
        self._clients = [Etcd3Client(host, port, timeout=MEMBER_LIMIT) for host, port in members]
        for client in self._clients:
            client.session.trust_env = False  # a proxy for the internet is none for the cluster
        self._ttl = max(1, round(ttl))
        self._lease_id: int | None = None
        self._lock = threading.Lock()

    @property
    def limit(self) -> float:
        """Seconds that a call may take if every member is silent."""
        return MEMBER_LIMIT * len(self._clients)

    def get(self, key: str) -> bytes | None:
        found: list[bytes] = self.ask(lambda client: client.get(key.encode()))
        if found and len(found[0]) > LARGEST_VALUE:
            raise MetadataError(f"etcd holds more than {LARGEST_VALUE} bytes for {key}")
        return found[0] if found else None

    def put(self, key: str, value: bytes) -> None:
        self._leased(lambda client, lease: client.put(key.encode(), value, lease))

    def replace(self, key: str, former: bytes | None, value: bytes) -> bool:
        if former is None:
            return self._leased(lambda client, lease: client.create(key.encode(), value, lease))
        there = former
        return self._leased(
            lambda client, lease: bool(
                client.transaction(_if_value(key, there, _put(key, value, lease))).get("succeeded")
            )
        )

    def renew(self, key: str, value: bytes) -> bool:
        if self.get(key) != value:
            return False
        lease_id = self._lease_id
        if lease_id is None:
            return False
        return self.ask(lambda client: Lease(lease_id, client).refresh()) > 0 or self._forget(lease_id)

    def remove(self, key: str, value: bytes) -> bool:
        delete: dict[str, object] = {"request_delete_range": {"key": _base64(key.encode())}}
        return self.ask(lambda client: bool(client.transaction(_if_value(key, value, delete)).get("succeeded")))

    def close(self) -> None:
        for client in self._clients:
            client.session.close()

    # -- members and the lease

    def ask(self, call: Callable[[Etcd3Client], _Result]) -> _Result:
        """What the first member that answers says.  Raises MetadataError."""
        reason = ""
        for client in list(self._clients):
            try:
                return call(client)
            except (ConnectionFailedError, ConnectionTimeoutError) as error:
                reason = _reason(error)
                with self._lock:
                    self._clients.sort(key=lambda other: other is client)
            except _BROKEN as error:
                raise MetadataError(
                    f"etcd at {client.host}:{client.port} refused a request: {_reason(error)}"
                ) from error
        members = ";".join(f"{client.host}:{client.port}" for client in self._clients)
        raise MetadataError(f"etcd at {members} cannot be reached ({reason})")

    def _leased(self, call: Callable[[Etcd3Client, Lease], _Result]) -> _Result:
        """As `ask`, under our lease; a new one if etcd does not know it any more."""
        lease_id = self._lease_id
        if lease_id is not None:
            try:
                return self.ask(lambda client: call(client, Lease(lease_id, client)))
            except MetadataError as error:
                if _LEASE_GONE not in str(error):
                    raise
        made = self._lease_id = self.ask(lambda client: client.lease(self._ttl).id)
        return self.ask(lambda client: call(client, Lease(made, client)))

    def _forget(self, lease_id: int) -> bool:
        with self._lock:
            if self._lease_id == lease_id:
                self._lease_id = None
        return False


def _if_value(key: str, value: bytes, action: dict[str, object]) -> dict[str, object]:
    """A transaction that does `action` if `value` is there."""
    compare = {"key": _base64(key.encode()), "result": "EQUAL", "target": "VALUE", "value": _base64(value)}
    return {"compare": [compare], "success": [action], "failure": []}


def _put(key: str, value: bytes, lease: Lease) -> dict[str, object]:
    return {"request_put": {"key": _base64(key.encode()), "value": _base64(value), "lease": lease.id}}


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


def _reason(error: Exception) -> str:
    """One short line."""
    text = " ".join((getattr(error, "detail_text", None) or str(error) or type(error).__name__).split())
    return text[:200]
