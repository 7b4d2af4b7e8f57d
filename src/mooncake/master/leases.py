"""Who may still be looking at what.

    probe lease   Exist, Query and GetStart: until `unit.lease`; blocks an unforced removal and eviction.
    read lease    GetStart: its objects' `readers` count until it is handed back or has run out; while one is left,
                  no byte of theirs is reused.

All leases last equally long, so both kinds end in the order in which they began.  Probe leases of 10 ms share one end
(rounded up): its float is also the mark by which the list knows the units that were not leased again since.
"""

from __future__ import annotations

from collections import deque

import msgspec

from mooncake.master.objects import Object, Unit

_SHARED_S = 0.01


class _Ends:
    """Units by the end of their lease, which is the same float for a whole list, and another one for each."""

    __slots__ = ("_at", "_lists")

    def __init__(self) -> None:
        self._lists: deque[tuple[float, list[Unit]]] = deque()
        self._at = 0  # first of the oldest list that was not taken yet

    def __bool__(self) -> bool:
        return bool(self._lists)

    def append(self, end: float, units: list[Unit]) -> None:
        self._lists.append((end, units))

    def ended(self, now: float, limit: int) -> list[Unit]:
        """Take up to `limit` units whose last lease has ended, in order."""
        units: list[Unit] = []
        while self._lists and self._lists[0][0] <= now and len(units) < limit:
            end, leased = self._lists[0]
            stop = self._at + limit - len(units)
            units += [unit for unit in leased[self._at : stop] if unit.lease is end]
            self._at = stop
            if stop >= len(leased):
                self._drop_oldest()
        return units

    def oldest(self, latest_end: float) -> Unit | None:
        """Take the unit whose lease ends first; None if none ends by `latest_end`."""
        while self._lists and self._lists[0][0] <= latest_end:
            end, leased = self._lists[0]
            while self._at < len(leased):
                unit = leased[self._at]
                self._at += 1
                if unit.lease is end:
                    return unit
            self._drop_oldest()
        return None

    def first(self) -> float | None:
        """The end of the lease that ends first."""
        while self._lists:
            end, leased = self._lists[0]
            while self._at < len(leased):
                if leased[self._at].lease is end:
                    return end
                self._at += 1
            self._drop_oldest()
        return None

    def _drop_oldest(self) -> None:
        self._lists.popleft()
        self._at = 0


class ProbeLeases:
    """Units under a probe lease."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self.moment_ends = -1.0  # leases granted before then share their end
        self._end = 0.0
        self._units: list[Unit] = []
        self._ends = _Ends()
        self._unbreakable = _Ends()  # were being read when they might have been broken

    def __bool__(self) -> bool:
        return bool(self._ends) or bool(self._unbreakable)

    def touch(self, objects: list[Object], now: float) -> None:
        """Lease the units of `objects`, the first of which shall leave last."""
        if now >= self.moment_ends:
            self._begin(now)
        end = self._end
        add = self._units.append
        for obj in reversed(objects):
            if obj.lease is not end:
                obj.lease = end
                group = obj.group
                if group is None:
                    add(obj)
                elif group.lease is not end:
                    group.lease = end
                    add(group)

    def _begin(self, now: float) -> None:
        self._end = now + _SHARED_S + self.ttl
        self._units = []
        self._ends.append(self._end, self._units)
        self.moment_ends = now + _SHARED_S

    def ended(self, now: float, limit: int) -> list[Unit]:
        """Up to `limit` units whose last lease has ended, in order."""
        units = self._ends.ended(now, limit)
        return units + self._unbreakable.ended(now, limit) if self._unbreakable else units

    def oldest(self) -> float | None:
        """When the oldest lease that may be broken was granted, within 10 ms; None if there is none."""
        end = self._ends.first()
        return None if end is None else end - self.ttl - _SHARED_S

    def break_oldest(self, latest_grant: float) -> Unit | None:
        """End the oldest lease under which nobody reads; None if none was granted by `latest_grant`."""
        while (unit := self._ends.oldest(latest_grant + self.ttl)) is not None:
            if not unit.readers:
                unit.lease = 0.0
                return unit
            unit.lease += 0.0  # another float of the same value
            self._unbreakable.append(unit.lease, [unit])
        return None


class ReadLease(msgspec.Struct, gc=False, eq=False):
    """`client`: the name of the one that reads; only it can hand the lease back."""

    number: int
    end: float
    objects: list[Object]
    client: str


class ReadLeases:
    """Open read leases by number, in the order of their ends.  Numbers are never used again, under no master."""

    def __init__(self, ttl: float, first: int) -> None:
        self._ttl = ttl
        self._number = first
        self._open: dict[int, ReadLease] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, lease: ReadLease) -> bool:
        return lease.number in self._open

    def begin(self, now: float, client: str) -> ReadLease:
        self._number += 1
        lease = ReadLease(self._number, now + self._ttl, [], client)
        self._open[self._number] = lease
        return lease

    def holder(self, number: int) -> str | None:
        """Who has this lease; None if it has ended."""
        lease = self._open.get(number)
        return None if lease is None else lease.client

    def end(self, number: int) -> list[Object]:
        """What was under this lease; nothing if it had ended."""
        lease = self._open.pop(number, None)
        return [] if lease is None else lease.objects

    def ended(self, now: float) -> ReadLease | None:
        """The oldest lease if it has run out; it stays open."""
        for lease in self._open.values():
            return lease if lease.end <= now else None
        return None
