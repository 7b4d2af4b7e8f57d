"""Elections in etcd: the leader's address under a key that hangs on a lease, his term under one that stays.

mooncake-store/CLUSTER/master_view   host:port
mooncake-store/CLUSTER/master_term   the last election's, in decimal
"""

from base64 import b64decode, b64encode
from typing import Any, NamedTuple

from mooncake.election.base import LEASE_S, Election, Outcome, View, next_term
from mooncake.errors import MetadataError
from mooncake.transfer.metadata.etcd import EtcdBackend

_SLACK_S = 0.5


class _Entry(NamedTuple):
    value: str
    revision: int  # of its last change; 0: it is not there


class EtcdElection(Election):
    def __init__(self, members: list[tuple[str, int]], cluster: str) -> None:
        """Connects to nothing yet.  Raises ConfigError if the client library is not installed."""
        self._etcd = EtcdBackend(members, LEASE_S)
        self._view_key = _base64(f"mooncake-store/{cluster}/master_view")
        self._term_key = _base64(f"mooncake-store/{cluster}/master_term")
        self._lease = 0
        self.limit = min(self._etcd.limit + _SLACK_S, LEASE_S - 1.5)

    def look(self) -> View | None:
        view, term = self._read()
        return View(view.value, _number(term)) if view.revision else None

    def stand(self, address: str) -> Outcome:
        view, former = self._read()
        if view.revision:
            return Outcome(View(view.value, _number(former)), False)
        term = next_term(_number(former))
        lease = int(self._etcd.ask(lambda client: client.lease(round(LEASE_S)).id))
        vacant = [_same(self._view_key, "CREATE", "create_revision", 0), self._unchanged(former)]
        if not self._change(vacant, [_put(self._view_key, address, lease), _put(self._term_key, str(term))]):
            return Outcome(None, False)
        self._lease = lease
        return Outcome(View(address, term), True)

    def renew(self, view: View) -> bool:
        from etcd3gw.lease import Lease

        if self.look() != view:
            return False
        return self._etcd.ask(lambda client: Lease(self._lease, client).refresh()) > 0

    def resign(self, view: View, least_term: int) -> None:
        found, former = self._read()
        if View(found.value, _number(former)) == view:
            end: dict[str, Any] = {"request_delete_range": {"key": self._view_key}}
            ours = [_same(self._view_key, "MOD", "mod_revision", found.revision), self._unchanged(former)]
            self._change(ours, [end, _put(self._term_key, str(max(view.term, least_term)))])

    def _read(self) -> tuple[_Entry, _Entry]:
        """The view and the term, of one moment."""
        ranges = [{"request_range": {"key": key}} for key in (self._view_key, self._term_key)]
        answer = self._etcd.ask(lambda client: client.transaction({"compare": [], "success": ranges, "failure": []}))
        try:
            view, term = (_entry(one["response_range"]) for one in answer["responses"])
        except (LookupError, TypeError, ValueError) as error:
            raise MetadataError(f"etcd's answer cannot be understood: {error!r}"[:200]) from None
        return view, term

    def _unchanged(self, term: _Entry) -> dict[str, Any]:
        return _same(self._term_key, "MOD", "mod_revision", term.revision)

    def _change(self, conditions: list[dict[str, Any]], actions: list[dict[str, Any]]) -> bool:
        transaction = {"compare": conditions, "success": actions, "failure": []}
        return bool(self._etcd.ask(lambda client: client.transaction(transaction)).get("succeeded"))


def _entry(found: dict[str, Any]) -> _Entry:
    entries = found.get("kvs")
    if not entries:
        return _Entry("", 0)
    return _Entry(b64decode(entries[0].get("value", "")).decode(), int(entries[0]["mod_revision"]))


def _number(term: _Entry) -> int:
    return int(term.value) if term.value.isdigit() else 0


def _same(key: str, target: str, field: str, value: int) -> dict[str, Any]:
    return {"key": key, "result": "EQUAL", "target": target, field: value}


def _put(key: str, value: str, lease: int = 0) -> dict[str, Any]:
    return {"request_put": {"key": key, "value": _base64(value), "lease": lease}}


def _base64(text: str) -> str:
    return b64encode(text.encode()).decode()
