"""Redis, with redis-py: the optional extra mooncake-py[redis]."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from urllib.parse import unquote, urlsplit

from mooncake.config_text import environment_whole
from mooncake.errors import ConfigError, MetadataError
from mooncake.transfer.metadata.base import LARGEST_VALUE, MetadataBackend

try:
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.client import Pipeline
    from redis.exceptions import RedisError, WatchError
    from redis.retry import Retry
except ImportError:
    raise ConfigError(
        "a redis metadata server needs the package redis: pip install 'mooncake-py[redis]' "
        "(or use http://, etcd:// or P2PHANDSHAKE)"
    ) from None

CONNECT_LIMIT, CALL_LIMIT = 1.5, 3.0  # seconds


class RedisBackend(MetadataBackend):
    def __init__(self, url: str, ttl: float) -> None:
        """Connects to nothing yet.  What the address leaves out, MC_REDIS_USERNAME, MC_REDIS_PASSWORD and
        MC_REDIS_DB_INDEX say.  Raises ConfigError."""
        try:
            parts = urlsplit(url)
            port = parts.port or 6379
            database = int(parts.path.strip("/") or environment_whole("MC_REDIS_DB_INDEX", 0))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            parts = urlsplit("")
        if not parts.hostname or parts.query or parts.fragment or database < 0:
            raise ConfigError(
                "the metadata server's address is wrong; expected redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE], "
                "DATABASE being a number"
            )
        self._where = f"{parts.hostname}:{port}"
        self._ttl = max(1, round(ttl))
        self._redis = Redis(
            host=parts.hostname,
            port=port,
            db=database,
            username=unquote(parts.username or "") or os.environ.get("MC_REDIS_USERNAME") or None,
            password=unquote(parts.password or "") or os.environ.get("MC_REDIS_PASSWORD") or None,
            ssl=parts.scheme == "rediss",
            socket_connect_timeout=CONNECT_LIMIT,
            socket_timeout=CALL_LIMIT,
            retry=Retry(NoBackoff(), 1),  # a connection that a restart has closed
        )

    def get(self, key: str) -> bytes | None:
        with self._asking():
            # A range, so that a huge value does not fill our memory.  One that is missing is empty.
            value = cast(bytes, self._redis.getrange(key, 0, LARGEST_VALUE))
        if len(value) > LARGEST_VALUE:
            raise MetadataError(f"redis at {self._where} holds more than {LARGEST_VALUE} bytes for {key}")
        return value or None

    def put(self, key: str, value: bytes) -> None:
        with self._asking():
            self._redis.set(key, value, ex=self._ttl)

    def replace(self, key: str, former: bytes | None, value: bytes) -> bool:
        if former is None:
            with self._asking():
                return bool(self._redis.set(key, value, ex=self._ttl, nx=True))
        return self._change(key, former, value)

    def renew(self, key: str, value: bytes) -> bool:
        if self.get(key) != value:
            return False
        with self._asking():
            return bool(self._redis.expire(key, self._ttl))

    def remove(self, key: str, value: bytes) -> bool:
        return self._change(key, value, None)

    def close(self) -> None:
        self._redis.close()

    def _change(self, key: str, former: bytes, value: bytes | None) -> bool:
        """Write or (None) delete, if `former` is there at that moment."""
        with self.transaction(key) as transaction:
            if transaction.get(key) != former:
                return False
            transaction.multi()
            if value is None:
                transaction.delete(key)
            else:
                transaction.set(key, value, ex=self._ttl)
            return self.commit(transaction)

    @contextmanager
    def transaction(self, *watched: str) -> Iterator[Pipeline]:
        """A transaction that fails if one of the `watched` keys is changed meanwhile; of those that are read at once,
        until its `multi`.  Raises MetadataError."""
        with self._asking(), self._redis.pipeline() as transaction:
            if watched:
                transaction.watch(*watched)  # type: ignore[no-untyped-call]  # redis-py gives it no types
            yield transaction

    def commit(self, transaction: Pipeline) -> bool:
        """Whether it was done."""
        try:
            transaction.execute()
        except WatchError:
            return False
        return True

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise MetadataError(f"redis at {self._where} cannot be used ({reason})") from error
