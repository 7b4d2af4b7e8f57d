"""Which slots of one segment's table are taken.

Low slots go first (a table's unused end takes no memory, and its owner scans only as far as it was used).
Freed runs are kept by length and reused as they are: records of one deployment need nearly always the same number.
(In arrays: a million Python ints that outlive their objects would keep the interpreter from giving memory back.)
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence

_MOST_RECOVERED = 1 << 28
_FREE = re.compile(rb"\0+").finditer


class Slots:
    """`take` and `give` runs of slots; `used` of `total` are taken."""

    __slots__ = ("_fresh", "_known", "_runs", "_seen", "total", "used")

    def __init__(self, total: int, known: bool = True) -> None:
        """`known` False: a table with records in it; `reserve` them all, then run `find_free`."""
        self.total = total
        self.used = 0
        self._fresh = 0  # never used from here on
        self._runs: dict[int, array[int]] = {}  # length → first slots of free runs of that length
        self._seen = bytearray()  # during a recovery: 1 for a taken slot
        self._known = total if known else 0

    def take(self, count: int) -> list[int] | None:
        """`count` slots in ascending order, in a row if possible; None if so many are not free."""
        runs = self._runs.get(count)
        if runs:
            first = runs.pop()
        elif self._fresh + count <= self.total:
            first = self._fresh
            self._fresh += count
        else:
            return self._gather(count)
        self.used += count
        return list(range(first, first + count))

    def _gather(self, count: int) -> list[int] | None:
        if self.total - self.used < count:
            return None
        found: list[int] = list(range(self._fresh, min(self.total, self._fresh + count)))
        self._fresh += len(found)
        while len(found) < count:
            length = max(length for length, runs in self._runs.items() if runs)
            first = self._runs[length].pop()
            need = min(length, count - len(found))
            found += range(first, first + need)
            if need < length:
                self._keep(first + need, length - need)
        self.used += count
        found.sort()  # only then the ends and the count of slots tell whether they are a row
        return found

    def give(self, slots: Sequence[int]) -> None:
        """Free these slots, which were taken."""
        self.used -= len(slots)
        if slots[0] < self._known and slots[-1] - slots[0] == len(slots) - 1 and slots[-1] < self._known:
            self._keep(slots[0], len(slots))
            return
        for slot in slots:
            if slot < self._known:
                self._keep(slot, 1)
            else:
                self._seen[slot] = 0

    def reserve(self, slots: Sequence[int]) -> bool:
        """Take these slots of a table that is not known yet; False, and nothing done, if one cannot be."""
        if not slots or len(set(slots)) < len(slots):
            return False
        if min(slots) < 0 or max(slots) >= min(self.total, _MOST_RECOVERED):
            return False
        seen = self._seen
        if max(slots) >= len(seen):
            seen.extend(bytes(min(self.total, max(slots) * 2 + 1024) - len(seen)))
        if any(seen[slot] for slot in slots):
            return False
        for slot in slots:
            seen[slot] = 1
        self.used += len(slots)
        return True

    def reserve_runs(self, runs: Sequence[int]) -> list[bool]:
        """As `reserve` of each run of slots (first << 8 | count).  One call for many, since a recovery has millions."""
        seen, limit = self._seen, min(self.total, _MOST_RECOVERED)
        highest = min((max(runs, default=0) >> 8) + 255, limit - 1)
        if highest >= len(seen):
            seen.extend(bytes(min(self.total, highest * 2 + 1024) - len(seen)))
        done = []
        for run in runs:
            first, count = run >> 8, run & 255
            free = count > 0 and first + count <= limit and seen.find(1, first, first + count) < 0
            if free:
                seen[first] = 1
                if count > 1:
                    seen[first : first + count] = b"\1" * count
                self.used += count
            done.append(free)
        return done

    def find_free(self) -> Iterator[None]:
        """After the last `reserve`: learn the free runs, in steps between which slots may be given back."""
        seen = self._seen
        end = seen.rfind(1) + 1
        while self._known < end:
            step = min(end, self._known + 4096)
            found: dict[int, list[int]] = {}
            for free in _FREE(seen, self._known, step):
                first, after = free.span()
                found.setdefault(after - first, []).append(first)
            for length, firsts in found.items():
                self._runs.setdefault(length, array("q")).extend(firsts)
            self._known = step
            yield
        self._fresh = end
        self._known = self.total
        self._seen = bytearray()

    def _keep(self, first: int, length: int) -> None:
        runs = self._runs.get(length)
        if runs is None:
            runs = self._runs[length] = array("q")
        runs.append(first)
