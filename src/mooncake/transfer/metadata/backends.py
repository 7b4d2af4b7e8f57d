"""The back end that an address means, and the limit of time that each of its calls has."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from mooncake.errors import ConfigError, MetadataError
from mooncake.transfer.metadata.base import MetadataBackend
from mooncake.transfer.metadata.limits import call_within

CALL_LIMIT = 3.0  # seconds
SLOW = 0.5  # seconds: after a failure that took longer, calls fail at once for as long as it took
MAX_CALLS = 16  # under way at once, abandoned ones among them
_Result = TypeVar("_Result")


def is_peer_to_peer(text: str) -> bool:
    """Whether engines find one another by address, without a metadata service."""
    return text.strip().upper() == "P2PHANDSHAKE"


def open_backend(text: str, ttl: float) -> MetadataBackend:
    """The back end at http://, https://, etcd://, redis:// or a bare HOST:PORT (etcd); entries live for `ttl` seconds.

    Connects to nothing yet.  Raises ConfigError: no such address, or its client library is not installed.
    """
    address = text.strip()
    scheme, separator, rest = address.partition("://")
    if not separator:
        scheme, rest = "etcd", address
    match scheme.lower():
        case "http" | "https":
            from mooncake.transfer.metadata.http import HttpBackend

            return Bounded(HttpBackend(address, ttl), CALL_LIMIT)
        case "redis" | "rediss":
            from mooncake.transfer.metadata.redis import RedisBackend

            return Bounded(RedisBackend(address, ttl), CALL_LIMIT)
        case "etcd":
            members = members_of(rest, text)
            if members:
                from mooncake.transfer.metadata.etcd import EtcdBackend

                backend = EtcdBackend(members, ttl)
                return Bounded(backend, max(CALL_LIMIT, backend.limit))
    raise ConfigError(
        f"metadata server {text!r} is not an address; expected P2PHANDSHAKE, http://HOST:PORT/metadata, "
        "etcd://HOST:PORT[;HOST:PORT], redis://HOST:PORT or HOST:PORT (etcd)"
    )


def members_of(text: str, whole: str) -> list[tuple[str, int]]:
    """HOST:PORT, separated by commas or semicolons.  `whole`: of which they are a part, for messages.  Raises
    ConfigError."""
    members = (member.rstrip("/") for member in text.replace(",", ";").split(";"))
    return [_member(member, whole) for member in members if member.strip()]


def _member(text: str, whole: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = text.strip(), "2379"
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in host:
        raise ConfigError(f"{whole!r}: {text!r} is not a HOST:PORT")
    return host.strip("[]"), int(port)


class Bounded(MetadataBackend):
    """Another back end, whose calls are given up after `limit` seconds, whatever keeps them."""

    def __init__(self, backend: MetadataBackend, limit: float) -> None:
        self._backend = backend
        self._limit = limit
        self._free = threading.BoundedSemaphore(MAX_CALLS)
        self._refused_until = 0.0

    def get(self, key: str) -> bytes | None:
        return self._within(lambda: self._backend.get(key))

    def put(self, key: str, value: bytes) -> None:
        self._within(lambda: self._backend.put(key, value))

    def replace(self, key: str, former: bytes | None, value: bytes) -> bool:
        return self._within(lambda: self._backend.replace(key, former, value))

    def renew(self, key: str, value: bytes) -> bool:
        return self._within(lambda: self._backend.renew(key, value))

    def remove(self, key: str, value: bytes) -> bool:
        return self._within(lambda: self._backend.remove(key, value))

    def close(self) -> None:
        self._backend.close()

    def _within(self, call: Callable[[], _Result]) -> _Result:
        started = time.monotonic()
        if started < self._refused_until or not self._free.acquire(blocking=False):
            raise MetadataError("the metadata server did not answer a moment ago")

        def run() -> _Result:
            try:
                return call()
            finally:
                self._free.release()

        try:
            return call_within(self._limit, run)
        except TimeoutError:
            self._remember(started)
            raise MetadataError(f"the metadata server has not answered within {self._limit:.0f} s") from None
        except MetadataError:
            self._remember(started)
            raise

    def _remember(self, started: float) -> None:
        """A call begun then has failed."""
        now = time.monotonic()
        if now - started > SLOW:
            self._refused_until = now + (now - started)
