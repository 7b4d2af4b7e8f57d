"""What was removed or put again while a segment was away, so that the segment revives none of it when it returns.

Kept for a while after the master's start (segments of an earlier master may still come) and after each loss of a
segment.  If there are too many, or the time is over, one number stands for all: records up to `floor` are dead.
"""

from __future__ import annotations

from mooncake.master.former import Former
from mooncake.master.tenants.names import scope_in

_MOST = 100_000


class Tombstones:
    """For each key the sequence number up to which its records are dead."""

    def __init__(self, window: float, now: float) -> None:
        self._window = window
        self._until = now + window
        self._seqs: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._scopes: dict[str, int] = {}
        self.floor = 0
        self.undelivered: dict[int, dict[int, int]] = {}  # segment → head slot → seq of kills it has not confirmed
        self.former: Former | None = None  # of the snapshot that we began with

    @property
    def keys(self) -> dict[str, int]:
        """Key → number up to which its records are dead; to be read only.  Likewise `groups` and `scopes`."""
        return self._seqs

    @property
    def groups(self) -> dict[str, int]:
        return self._groups

    @property
    def scopes(self) -> dict[str, int]:
        return self._scopes

    def lost(self, segment: int, doomed: dict[int, int], now: float) -> None:
        """A segment went away with these kills (by head slot) unconfirmed."""
        self._until = now + self._window
        self.undelivered[segment] = doomed

    def note(self, key: str, seq: int) -> None:
        """Records of `key` up to `seq` are dead; the directory's newest sequence number is at least `seq`."""
        if self._until and seq > self.floor:
            self._seqs[key] = max(seq, self._seqs.get(key, 0))
            if len(self._seqs) > _MOST:
                self.raise_floor(max(self._seqs.values()))

    def note_group(self, name: str, seq: int) -> None:
        """A group was evicted: its members' records up to `seq` are dead, wherever they are."""
        if self._until and seq > self.floor:
            self._groups[name] = seq
            if len(self._groups) > _MOST:
                self.raise_floor(seq)

    def note_scope(self, scope: str, seq: int) -> None:
        """Everything of a tenant was removed: records up to `seq` whose keys start with `scope` are dead."""
        if self._until and seq > self.floor:
            self._scopes[scope] = seq

    def raise_floor(self, seq: int) -> None:
        """Every record of a segment that is away now, up to `seq`, is dead."""
        self.floor = max(self.floor, seq)
        self._seqs.clear()
        self._groups.clear()
        self._scopes.clear()

    def outbid(self, seq: int) -> None:
        """A former master's numbers were higher than ours, up to `seq`: what died under us died after its records."""
        self._seqs = dict.fromkeys(self._seqs, seq)
        self._groups = dict.fromkeys(self._groups, seq)
        self._scopes = dict.fromkeys(self._scopes, seq)
        if self.floor:
            self.floor = seq

    def expire(self, now: float, seq: int) -> None:
        """When the time is over: whatever still comes is dead up to `seq`."""
        if self._until and now >= self._until:
            self._until = 0.0
            self.undelivered.clear()
            self.former = None
            self.raise_floor(seq)

    @property
    def quiet(self) -> bool:
        """Whether there is nothing that `kills` could say of anything."""
        return not (self.floor or self._seqs or self._groups or self._scopes or self.undelivered or self.former)

    def kills(self, segment: int, slot: int, key: str, group: str, seq: int, version: int) -> bool:
        """Whether this announced record, of the value with the sequence number `version`, is dead."""
        return (
            version <= self.floor
            or version <= self._seqs.get(key, 0)
            or (bool(group) and version <= self._groups.get(group, 0))
            or (bool(self._scopes) and version <= self._scopes.get(scope_in(key), 0))
            or seq <= self.undelivered.get(segment, {}).get(slot, 0)
            or (self.former is not None and self.former.kills(segment, slot, key, group, seq, version))
        )
