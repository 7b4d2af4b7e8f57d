"""The list of snapshots, if it is kept apart from them: a sorted set in redis (mooncake-py[redis])."""

from __future__ import annotations

from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from mooncake.master.snapshots.stores import ASIDE, SUFFIX, Store

_LIMIT = 3.0  # seconds


class Listed(Store):
    """The snapshots of `inner` that a set in redis names.  All have one score, so their order is the alphabet's."""

    def __init__(self, inner: Store, address: str, cluster: str) -> None:
        self.inner: Store = inner
        self._set = f"mooncake-store/{cluster}/snapshots"
        self._address = address.rpartition("@")[2].rpartition("//")[2]  # without a password
        self._redis = Redis.from_url(
            address if "://" in address else f"redis://{address}",
            socket_connect_timeout=_LIMIT,
            socket_timeout=_LIMIT,
            retry=Retry(NoBackoff(), 1),
        )

    def _ask(self, command: str, *arguments: Any) -> Any:
        try:
            return self._redis.execute_command(command, self._set, *arguments)  # type: ignore[no-untyped-call]
        except RedisError as error:
            raise OSError(f"redis at {self._address}: {error}") from None

    def names(self) -> list[str]:
        found = [name.decode(errors="replace") for name in self._ask("ZRANGE", 0, -1)]
        return [name for name in found if name.endswith((SUFFIX, ASIDE))]

    def read(self, name: str) -> bytes:
        return self.inner.read(name)

    def write(self, name: str, raw: bytes) -> None:
        self.inner.write(name, raw)
        self._ask("ZADD", 0, name)

    def delete(self, name: str) -> None:
        self._ask("ZREM", name)
        self.inner.delete(name)

    def set_aside(self, name: str) -> None:
        self.inner.set_aside(name)
        self._ask("ZREM", name)
        self._ask("ZADD", 0, name.removesuffix(SUFFIX) + ASIDE)
