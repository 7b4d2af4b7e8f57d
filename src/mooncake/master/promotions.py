"""Values that are on disk only and are asked for often come back to memory, when nobody waits for that.

A read counts its keys in a sketch; who was asked for often enough is a candidate.  A tier's server is given few at a
time, so that reads keep the disk; the others wait their turn.  The memory copy is a record of its own, with a new
number (the old one may be lower than what its slots have seen), on the segment whose server has the disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.objects import GONE, PROMOTING, Object, PartAt, in_memory, on_disk
from mooncake.master.placement import Item, give_back, place_one
from mooncake.master.pool import Pool, Segment
from mooncake.master.sketch import FrequencySketch
from mooncake.rpc.disk_messages import Promotion
from mooncake.rpc.record_messages import Part

if TYPE_CHECKING:
    from mooncake.master.catalog import Catalog


class Promoting(msgspec.Struct, gc=False, eq=False):
    """One under way: `obj` is to get the record `seq` at `part`."""

    obj: Object
    seq: int
    disk_seq: int
    part: PartAt

    def order(self) -> Promotion:
        part = self.part
        return Promotion(self.disk_seq, self.seq, Part(part.segment.number, list(part.slots), list(part.extents)))


class Promotions:
    """Candidates, and promotions under way."""

    def __init__(self, config: MasterConfig, counters: Counters, pool: Pool, catalog: Catalog) -> None:
        self._config = config
        self._counters = counters
        self._pool = pool
        self._catalog = catalog
        self._sketch = FrequencySketch() if config.promotion_on_hit else None
        self._under_way: dict[int, dict[int, Promoting]] = {}  # segment → seq → promotion
        self._candidates: deque[Object] = deque()
        self.next_seq: Callable[[], int] = int  # of the directory

    @property
    def in_flight(self) -> int:
        return sum(map(len, self._under_way.values()))

    def hit(self, obj: Object) -> None:
        """`obj` was read from disk."""
        if self._sketch is None or obj.flags & PROMOTING:
            return
        if self._sketch.add(obj.key) < self._config.promotion_admission_threshold:
            self._counters["master_promotion_rejected_frequency_total"] += 1
        elif len(self._candidates) >= self._config.promotion_queue_limit:
            self._counters["master_promotion_candidate_dropped_limit_total"] += 1
        else:
            obj.flags |= PROMOTING
            self._counters["master_promotion_candidate_recorded_total"] += 1
            self._candidates.append(obj)
            self.go_on()

    def go_on(self) -> None:
        """Order as many promotions as servers may be given now; a tier that is busy holds up the others' candidates
        only until one of its own is done."""
        candidates = self._candidates
        while candidates:
            obj = candidates[0]
            if not obj.flags & PROMOTING or obj.flags & GONE or in_memory(obj) or not on_disk(obj):
                candidates.popleft().flags &= ~PROMOTING
                self._counters["master_promotion_candidate_expired_unevaluated_total"] += 1
                continue
            assert obj.disk is not None
            segment = obj.disk.segment
            if len(self._under_way.get(segment.number, ())) >= max(1, self._config.promotion_max_per_heartbeat):
                return
            candidates.popleft()
            self._begin(obj, segment)

    def _begin(self, obj: Object, segment: Segment) -> None:
        part = None
        fits = self._pool.fill() <= self._config.high_watermark and self._catalog.has_room(obj, obj.size)
        if segment in self._pool.placeable and fits:
            part = _room(segment, obj)
        if part is None:
            obj.flags &= ~PROMOTING
            self._counters["master_promotion_rejected_watermark_total"] += 1
            return
        assert obj.disk is not None
        promoting = Promoting(obj, self.next_seq(), obj.disk.seq, part)
        self._under_way.setdefault(segment.number, {})[promoting.seq] = promoting
        self._pool.order(segment).promote.append(promoting.order())
        self._counters["master_promotion_admitted_total"] += 1
        self._counters["master_promotion_candidate_admitted_total"] += 1

    def report(self, segment: Segment, done: list[int], failed: list[int], now: float) -> None:
        """What became of promotions that the server of `segment` was given."""
        under_way = self._under_way.get(segment.number, {})
        for seq in done:
            promoting = under_way.pop(seq, None)
            if promoting is not None:
                self._done(promoting, now)
        for seq in failed:
            promoting = under_way.pop(seq, None)
            if promoting is not None:
                promoting.obj.flags &= ~PROMOTING
                self._counters["master_promotion_failed_total"] += 1
                self._pool.kill(promoting.part, seq, now, clean=True)
        self.go_on()

    def _done(self, promoting: Promoting, now: float) -> None:
        obj = promoting.obj
        obj.flags &= ~PROMOTING
        is_same = on_disk(obj) and obj.disk is not None and obj.disk.seq == promoting.disk_seq
        if obj.flags & GONE or in_memory(obj) or not is_same:
            self._counters["master_promotion_cancelled_total"] += 1
            self._pool.kill(promoting.part, promoting.seq, now, clean=True)
            return
        obj.seq = promoting.seq
        self._catalog.add_replicas(obj, ((promoting.part,),), now)
        self._counters["master_promotion_completed_total"] += 1
        self._counters["master_promotion_completed_bytes_total"] += obj.size

    def order_again(self, segment: Segment) -> None:
        """The server of `segment` may not have got its orders."""
        orders = self._pool.order(segment)
        orders.promote.extend(promoting.order() for promoting in self._under_way.get(segment.number, {}).values())

    def lose(self, segment: Segment, now: float) -> None:
        """Its server is gone, or has forgotten its orders."""
        for promoting in self._under_way.pop(segment.number, {}).values():
            promoting.obj.flags &= ~PROMOTING
            self._pool.kill(promoting.part, promoting.seq, now, clean=False)
            self._counters["master_promotion_cancelled_total"] += 1


def _room(segment: Segment, obj: Object) -> PartAt | None:
    """Room in `segment` for a record of `obj`."""
    group = "" if obj.group is None else obj.group.name
    replicas = place_one([segment], Item(obj.key, obj.size, group, _LONGEST_NAME), 1)
    if not replicas:
        return None
    if len(replicas[0]) > 1:
        give_back(replicas)
        return None
    return replicas[0][0]


_LONGEST_NAME = "x" * 64  # the record names the client that put the value, which the directory does not know
