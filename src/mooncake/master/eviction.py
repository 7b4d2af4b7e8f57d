"""In which order units leave when room is needed: one small interface, and LRU behind it.

The directory tells a policy only of units that may go: not of those that are leased, being read, hard-pinned or in
progress, nor of those that were just put, which are `Fresh` first.  A unit that becomes leased stays where it is;
should it come up, the directory takes it out, and brings it back (`touch`) when its lease has ended.  So a read costs a
policy nothing, and a leased unit is looked at once a lease at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from mooncake.master.objects import FRESH, Unit

_SHARED_S = 0.01
_MARK = -1  # flags of what is no unit, but the place of a walk


class EvictionPolicy(Protocol):
    """Which unit goes next."""

    def touch(self, unit: Unit) -> None:
        """`unit` was put, or its last lease has ended just now.  It may be in the policy already."""

    def touch_new(self, units: list[Unit]) -> None:
        """As `touch` of each; none of them is in the policy."""

    def remove(self, unit: Unit) -> None:
        """`unit` is gone or may not go.  No error if it is not in the policy."""

    def victim(self) -> Unit | None:
        """The unit that should go next; it stays in the policy."""

    def put_first(self, unit: Unit) -> None:
        """`unit`, which is in the policy, shall go before all others."""

    def walk(self, length: int) -> Iterator[list[Unit]]:
        """All units, those first that go first, in lists of at most `length`.  Units may come and go between two
        lists; one that is touched meanwhile comes again.  Run it to its end, or close it."""

    def __contains__(self, unit: Unit) -> bool: ...


class Lru:
    """Least recently used first: the one whose lease ended, or that was put, longest ago."""

    __slots__ = ("_end",)

    def __init__(self) -> None:
        end = self._end = Unit()  # of a ring: end.after is the oldest, end.before the newest
        end.before = end.after = end

    def touch(self, unit: Unit) -> None:
        if unit.before is not None:
            self.remove(unit)
        end = self._end
        newest = end.before
        unit.before, unit.after = newest, end
        newest.after = end.before = unit  # type: ignore[union-attr]

    def touch_new(self, units: list[Unit]) -> None:
        end = self._end
        newest = end.before
        for unit in units:
            unit.before = newest
            newest.after = unit  # type: ignore[union-attr]
            newest = unit
        newest.after, end.before = end, newest  # type: ignore[union-attr]

    def remove(self, unit: Unit) -> None:
        before, after = unit.before, unit.after
        if before is not None and after is not None:
            before.after, after.before = after, before
            unit.before = unit.after = None

    def victim(self) -> Unit | None:
        end = self._end
        oldest = end.after
        while oldest.flags == _MARK:  # type: ignore[union-attr]
            oldest = oldest.after  # type: ignore[union-attr]
        return None if oldest is end else oldest

    def put_first(self, unit: Unit) -> None:
        self.remove(unit)
        self._insert_after(self._end, unit)

    def walk(self, length: int) -> Iterator[list[Unit]]:
        mark = Unit(flags=_MARK)
        self._insert_after(self._end, mark)
        try:
            while True:
                units: list[Unit] = []
                unit = mark
                while len(units) < length and (unit := unit.after) is not self._end:  # type: ignore[assignment]
                    if unit.flags != _MARK:
                        units.append(unit)
                if not units:
                    return
                self.remove(mark)
                self._insert_after(units[-1], mark)
                yield units
        finally:
            self.remove(mark)

    def _insert_after(self, before: Unit, unit: Unit) -> None:
        after = before.after
        unit.before, unit.after = before, after
        before.after = after.before = unit  # type: ignore[union-attr]

    def __contains__(self, unit: Unit) -> bool:
        return unit.before is not None


class Fresh:
    """Units that were put within the last `span` seconds, as long as a lease lasts.

    Who reads a value leases it, and so keeps it out of the policy for that long.  Without this, a value that was put a
    moment ago would be the only one that may go, before all that were read in the last seconds: the newest first.
    """

    def __init__(self, order: EvictionPolicy, span: float) -> None:
        self.order = order
        self._span = span
        self._moments: deque[tuple[float, list[Unit]]] = deque()
        self._at = 0  # first of the oldest moment that was not taken yet

    def add(self, unit: Unit, now: float) -> None:
        unit.flags |= FRESH
        self.order.touch(unit)
        if not self._moments or now >= self._moments[-1][0] + _SHARED_S:
            self._moments.append((now, []))
        self._moments[-1][1].append(unit)

    def add_new(self, units: list[Unit], now: float) -> None:
        """As `add` of each; none of them is in any order."""
        for unit in units:
            unit.flags |= FRESH
        self.order.touch_new(units)
        self._moments.append((now, units))

    def remove(self, unit: Unit) -> None:
        unit.flags &= ~FRESH
        self.order.remove(unit)

    def ended(self, now: float, limit: int) -> list[Unit]:
        """Take up to `limit` units that are not fresh any more, in the order in which they were put."""
        units: list[Unit] = []
        while len(units) < limit and (since := self.oldest()) is not None and since <= now - self._span:
            unit = self._moments[0][1][self._at]
            self._at += 1
            self.remove(unit)
            units.append(unit)
        return units

    def oldest(self) -> float | None:
        """When the oldest one was put, within 10 ms; None if there is none."""
        moments = self._moments
        while moments:
            since, units = moments[0]
            while self._at < len(units):
                if units[self._at].flags & FRESH:
                    return since
                self._at += 1
            moments.popleft()
            self._at = 0
        return None
