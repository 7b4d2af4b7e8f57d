"""KV events: what subscribers are to be told of the values that come and go.  No I/O (see `kv_publisher`).

A value is told of by medium: `stored` when it has come to memory or to disk, `removed` when it has left, whatever made
it leave.  What was told last is written on the object, so a change may be reported twice, or not have been one.

`cleared` stands for one `removed` of everything: after it, what was told before counts as untold.  So a value that
stays (being leased) is told again, and one that goes is not.  Two clears are told apart by an era of one bit, hence a
clear that begins before another has looked at every value is not told as one: its removals are told singly.

Events wait in a queue of bounded length.  When it is full the oldest goes, and is counted; their numbers show the gap.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from mooncake.master.counters import Counters
from mooncake.master.objects import TOLD_DISK, TOLD_ERA, TOLD_MEMORY, Object, in_memory, on_disk

STORED, REMOVED, CLEARED = "stored", "removed", "cleared"
MEMORY, DISK = "cpu", "disk"
_TOLD = ((TOLD_MEMORY, MEMORY), (TOLD_DISK, DISK))


class KvEvent(msgspec.Struct, gc=False):
    """`number` counts all events of this master, lost ones too.  `medium` is "" of a clear."""

    number: int
    time_ms: int
    kind: str
    key: str
    group: str
    medium: str


class KvEvents:
    """The events that wait.  `on_first` is called when there is one again."""

    def __init__(self, capacity: int, counters: Counters) -> None:
        self.on_first: Callable[[], None] = lambda: None
        self._capacity = max(1, capacity)
        self._counters = counters
        self._waiting: deque[KvEvent] = deque()
        self._number = 0
        self._era = 0
        self._clearing = False

    def __len__(self) -> int:
        return len(self._waiting)

    def changed(self, obj: Object) -> None:
        """`obj`, which is in the directory, may have come to a medium or left one."""
        told = self._told(obj)
        now = (TOLD_MEMORY if in_memory(obj) else 0) | (TOLD_DISK if on_disk(obj) else 0)
        if now != told:
            self._tell(obj, told, now)

    def gone(self, obj: Object) -> None:
        """`obj` is leaving the directory, and all media."""
        told = self._told(obj)
        if told:
            self._tell(obj, told, 0)

    @contextmanager
    def clearing(self) -> Iterator[None]:
        """All that was told before is void.  Inside, `changed` is to be called for everything that stays."""
        if self._clearing:
            yield
            return
        self._era ^= TOLD_ERA
        self._add(CLEARED, "", "", "")
        self._clearing = True
        try:
            yield
        finally:
            self._clearing = False

    @property
    def is_clearing(self) -> bool:
        return self._clearing

    @property
    def is_crowded(self) -> bool:
        """Whether so many wait that further ones should, unless they come by themselves."""
        return len(self._waiting) > self._capacity // 2

    def take(self, most: int) -> list[KvEvent]:
        """The oldest events, up to `most`."""
        waiting = self._waiting
        return [waiting.popleft() for _ in range(min(most, len(waiting)))]

    def _told(self, obj: Object) -> int:
        flags = obj.flags
        return flags & (TOLD_MEMORY | TOLD_DISK) if flags & TOLD_ERA == self._era else 0

    def _tell(self, obj: Object, told: int, now: int) -> None:
        obj.flags = obj.flags & ~(TOLD_MEMORY | TOLD_DISK | TOLD_ERA) | now | self._era
        group = "" if obj.group is None else obj.group.name
        for bit, medium in _TOLD:
            if (told ^ now) & bit:
                self._add(STORED if now & bit else REMOVED, obj.key, group, medium)

    def _add(self, kind: str, key: str, group: str, medium: str) -> None:
        waiting = self._waiting
        if len(waiting) >= self._capacity:
            waiting.popleft()
            self._counters["mooncake_kv_events_dropped_total"] += 1
        elif not waiting:
            self.on_first()
        waiting.append(KvEvent(self._number, int(time.time() * 1000), kind, key, group, medium))
        self._number += 1
