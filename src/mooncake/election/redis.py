"""Elections in redis: the leader's address under a key that expires, his term under one that stays.

    mooncake-store/{CLUSTER}/master_view           host:port
    mooncake-store/{CLUSTER}/master_view_version   the last election's term

The braces are part of the keys: they keep both on one server of a redis cluster.
"""

from typing import cast

from mooncake.election.base import LEASE_S, Election, Outcome, View, next_term
from mooncake.transfer.metadata.redis import RedisBackend

_MOST_BYTES = 300


class RedisElection(Election):
    def __init__(self, url: str, cluster: str) -> None:
        """Connects to nothing yet.  Raises ConfigError: no such address, or the client library is not installed."""
        self._redis = RedisBackend(url, LEASE_S)
        self._view_key = f"mooncake-store/{{{cluster}}}/master_view"
        self._term_key = f"mooncake-store/{{{cluster}}}/master_view_version"

    def look(self) -> View | None:
        with self._redis.transaction() as transaction:
            for key in (self._view_key, self._term_key):
                transaction.getrange(key, 0, _MOST_BYTES)
            view, term = cast(list[bytes], transaction.execute())
        return View(view.decode(errors="replace"), _number(term)) if view else None

    def stand(self, address: str) -> Outcome:
        with self._redis.transaction(self._view_key, self._term_key) as transaction:
            found = cast(bytes | None, transaction.get(self._view_key))
            former = _number(cast(bytes | None, transaction.get(self._term_key)))
            if found:
                return Outcome(View(found.decode(errors="replace"), former), False)
            view = View(address, next_term(former))
            transaction.multi()
            transaction.set(self._view_key, address, px=round(LEASE_S * 1e3))
            transaction.set(self._term_key, view.term)
            won = self._redis.commit(transaction)
        return Outcome(view if won else None, won)

    def renew(self, view: View) -> bool:
        with self._redis.transaction(self._view_key, self._term_key) as transaction:
            if (transaction.get(self._view_key), transaction.get(self._term_key)) != _stored(view):
                return False
            transaction.multi()
            transaction.pexpire(self._view_key, round(LEASE_S * 1e3))
            return self._redis.commit(transaction)

    def resign(self, view: View, least_term: int) -> None:
        with self._redis.transaction(self._view_key, self._term_key) as transaction:
            if (transaction.get(self._view_key), transaction.get(self._term_key)) == _stored(view):
                transaction.multi()
                transaction.delete(self._view_key)
                transaction.set(self._term_key, max(view.term, least_term))
                self._redis.commit(transaction)


def _number(term: bytes | None) -> int:
    return int(term) if term and term.isdigit() else 0


def _stored(view: View) -> tuple[bytes, bytes]:
    return view.address.encode(), str(view.term).encode()
