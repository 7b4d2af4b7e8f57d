"""The back end that an address means, and the limit of time that each of its calls has."""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from mooncake.errors import ConfigError, MetadataError
from mooncake.transfer.metadata.base import MetadataBackend

CALL_LIMIT = 3.0  # seconds
SLOW = 0.5  # seconds: after a failure that took longer, calls fail at once for as long as it took
MAX_CALLS = 16  # under way at once, abandoned ones among them
THREAD = "mooncake-engine-metadata-call"
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
            members = [
                _member(member, text) for member in rest.rstrip("/").replace(",", ";").split(";") if member.strip()
            ]
            if members:
                from mooncake.transfer.metadata.etcd import EtcdBackend

                backend = EtcdBackend(members, ttl)
                return Bounded(backend, max(CALL_LIMIT, backend.limit))
    raise ConfigError(
        f"metadata server {text!r} is not an address; expected P2PHANDSHAKE, http://HOST:PORT/metadata, "
        "etcd://HOST:PORT[;HOST:PORT], redis://HOST:PORT or HOST:PORT (etcd)"
    )


def _member(text: str, whole: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = text.strip(), "2379"
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in host:
        raise ConfigError(f"metadata server {whole!r}: {text!r} is not a HOST:PORT")
    return host.strip("[]"), int(port)


class Bounded(MetadataBackend):
    """Another back end, whose calls are given up after `limit` seconds: a name server, a stopped service or one that
    answers byte by byte would otherwise hold a caller longer than any limit of a single system call.

    Each call has a thread of its own; one that is given up ends by itself later.
    """

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
        outcome: SimpleQueue[tuple[_Result | None, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                outcome.put((call(), None))
            except BaseException as error:  # raised again where the call was made
                outcome.put((None, error))
            finally:
                self._free.release()

        threading.Thread(target=run, name=THREAD, daemon=True).start()
        error: BaseException | None
        try:
            result, error = outcome.get(timeout=self._limit)
        except Empty:
            result, error = None, MetadataError(f"the metadata server has not answered within {self._limit:.0f} s")
        if error is not None:
            now = time.monotonic()
            if now - started > SLOW:
                self._refused_until = now + (now - started)
            raise error
        return result  # type: ignore[return-value]  # None is a result like any other
