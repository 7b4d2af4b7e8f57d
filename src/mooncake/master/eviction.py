"""In which order units leave when room is needed: one small interface, and LRU behind it.

The directory tells a policy only of units that may go: not of those that are leased, being read, hard-pinned or in
progress.  A unit that becomes leased stays where it is; should it come up, the directory takes it out, and brings it
back (`touch`) when its lease has ended.  So a read costs a policy nothing, and a leased unit is looked at once a lease
at most.
"""

from __future__ import annotations

from typing import Protocol

from mooncake.master.objects import Unit


class EvictionPolicy(Protocol):
    """Which unit goes next."""

    def touch(self, unit: Unit) -> None:
        """`unit` was put, or its last lease has ended just now.  It may be in the policy already."""

    def remove(self, unit: Unit) -> None:
        """`unit` is gone or may not go.  No error if it is not in the policy."""

    def victim(self) -> Unit | None:
        """The unit that should go next; it stays in the policy."""

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

    def remove(self, unit: Unit) -> None:
        before, after = unit.before, unit.after
        if before is not None and after is not None:
            before.after, after.before = after, before
            unit.before = unit.after = None

    def victim(self) -> Unit | None:
        oldest = self._end.after
        return None if oldest is self._end else oldest

    def __contains__(self, unit: Unit) -> bool:
        return unit.before is not None
