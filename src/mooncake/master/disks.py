"""The values on disk: who has a tier, what is to be written there, what may leave memory because it is there.

    in memory ──order──► being written ──report──► in memory and on disk ──eviction──► on disk only ──promotion──┐
        │                     │ cannot be written         ▲──────────────────────────────────────────────────────┘
        └──────eviction──► lost, and counted

Values are written by the server whose memory they are in; one that lies in parts by a server that has one of them,
which fetches the others.  Eviction from memory asks `write_first`: it waits for the write, and refuses while too many
wait.  All orders may be repeated: a server that returns on a new connection gets those again of which nothing was
reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from mooncake.errors import ErrorCode, StoreError
from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.objects import (
    GONE,
    SLOT_COUNT_BITS,
    UNWRITABLE,
    WRITING,
    Object,
    OnDisk,
    PartAt,
    Replica,
    Unit,
    granules,
    in_memory,
    on_disk,
    parts,
)
from mooncake.master.pool import Pool, Segment
from mooncake.master.promotions import Promotions
from mooncake.master.tombstones import Tombstones
from mooncake.rpc.disk_messages import DiskMount, DiskOrders, DiskReport, Gather, Piece

if TYPE_CHECKING:
    from mooncake.master.catalog import Catalog


class Pending(msgspec.Struct, gc=False, eq=False):
    """A write of the record `seq`, ordered from the server of `segment`.  `leaving`: its bytes of memory are wanted as
    soon as it is done.  `parts`: all of the replica, if those are several."""

    obj: Object
    segment: Segment
    seq: int
    slot: int
    taken: int
    parts: Replica = ()
    leaving: bool = False

    def leave(self, sign: int) -> None:
        """Count what will come free: +1 from now on, -1 no longer."""
        if not self.parts:
            self.segment.leaving += sign * self.taken
        for part in self.parts:
            if part.segment.mounted:
                part.segment.leaving += sign * part.taken

    def order(self, orders: DiskOrders) -> None:
        """Put the order to write it among `orders`."""
        if not self.parts:
            orders.slots.append(self.slot)
            orders.seqs.append(self.seq)
            return
        pieces = [
            Piece(part.segment.number, part.segment.info.tcp, part.slots[0], list(part.extents)) for part in self.parts
        ]
        orders.gather.append(Gather(self.seq, pieces))


class Tier(msgspec.Struct, eq=False):
    """The tier of one mounted segment's server.  `dropping`: values that it was told to forget, and has not yet."""

    number: int
    path: str
    used: int
    quota: int = 0
    queue: int = 0
    leaving: int = 0
    filled: bool = False
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    pending: dict[int, Pending] = msgspec.field(default_factory=dict)
    dropping: dict[int, None] = msgspec.field(default_factory=dict)


class Disks:
    """All tiers."""

    def __init__(
        self, config: MasterConfig, counters: Counters, pool: Pool, catalog: Catalog, tombstones: Tombstones
    ) -> None:
        self._config = config
        self._counters = counters
        self._pool = pool
        self._catalog = catalog
        self._tombstones = tombstones
        self._refused: list[Unit] = []  # would leave memory, but the queue was full
        self.promotions = Promotions(config, counters, pool, catalog)
        self.values = 0  # that are on disk

    # -- tiers

    def figures(self) -> dict[str, int]:
        """What there is and what has happened, by the metrics' names."""
        tiers = [segment.tier for segment in self._pool.segments.values() if segment.tier is not None]

        def total(name: str) -> int:
            return sum(tier.counts.get(name, 0) for tier in tiers)

        return {
            "master_allocated_file_size_bytes": sum(tier.used for tier in tiers),
            "master_total_file_capacity_bytes": sum(tier.quota for tier in tiers),
            "master_promotion_in_flight": self.promotions.in_flight,
            "file_cache_nums_": self.values,
            "mooncake_disk_tiers": sum(tier.filled for tier in tiers),
            "mooncake_offload_queue": sum(len(tier.pending) for tier in tiers),
            "mooncake_disk_written_bytes": total("written_bytes"),
            "mooncake_disk_read_bytes": total("read_bytes"),
            "mooncake_disk_reads": total("read"),
            "mooncake_disk_writes": total("written"),
            "mooncake_disk_corrupt": total("corrupt"),
            "mooncake_disk_torn": total("torn"),
            "mooncake_disk_compacted": total("compacted"),
            "mooncake_disk_compacted_bytes": total("compacted_bytes"),
        }

    def mount(self, segment: Segment, request: DiskMount, now: float) -> bool:
        """The server of `segment` has a tier.  Whether what it holds is known here.  Raises StoreError."""
        if not self._config.enable_offload:
            raise StoreError(ErrorCode.UNAVAILABLE_IN_CURRENT_MODE, "the master was started without --enable_offload")
        if request.tier <= 0 or request.used < 0:
            raise StoreError(ErrorCode.INVALID_PARAMS, f"impossible tier {request.tier} of {request.used} bytes")
        for other in self._pool.segments.values():
            if other is not segment and other.tier is not None and other.tier.number == request.tier:
                self.lose(other, now)  # its server is gone, as we shall hear soon
        tier = segment.tier
        if tier is not None and tier.number == request.tier:
            if tier.filled:  # else its announcement was cut short, and begins again
                self._order_again(segment, tier)
            return tier.filled
        if tier is not None:
            self.lose(segment, now)
        segment.tier = Tier(request.tier, request.path, request.used)
        return False

    def _order_again(self, segment: Segment, tier: Tier) -> None:
        segment.orders = None
        orders = self._pool.order(segment)
        for pending in tier.pending.values():
            pending.order(orders)
        orders.drop.extend(tier.dropping)
        self.promotions.order_again(segment)

    def lose(self, segment: Segment, now: float) -> None:
        """Its server is gone, and the tier with it (it may come back)."""
        tier = segment.tier
        if tier is None:
            return
        segment.tier = segment.orders = None
        self._tombstones.lost(tier.number, {seq: seq for seq in tier.dropping}, now)
        self.promotions.lose(segment, now)
        for pending in tier.pending.values():
            pending.obj.flags &= ~WRITING
            if pending.leaving:
                pending.leave(-1)
                self._catalog.note_leaving(pending.obj, -pending.taken)
                self._catalog.settle(pending.obj.unit(), now)
        self._settle_refused(now)

    # -- writing

    def put_ended(self, obj: Object) -> None:
        """A new value is whole: write it now, unless values are only written when they leave."""
        if self._config.offload_on_evict:
            return
        place = _place_of(obj)
        if place is not None and len(_tier(place.segment).pending) < self._config.offloading_queue_limit:
            self._order_write(obj, place)

    def write(self, obj: Object) -> bool:
        """Have `obj` written, now or when it is asked again; False: no tier will take it."""
        place = _place_of(obj)
        if place is None:
            return self._pending(obj) is not None
        if self._pending(obj) is None and not self._is_full(_tier(place.segment)):
            self._order_write(obj, place)
        return True

    def write_first(self, unit: Unit, objects: list[Object]) -> int | None:
        """`objects`, all of `unit`, are to leave memory.  None: they may, now; else how many bytes will come free when
        they have been written, 0 if they must stay for now."""
        writes = []
        for obj in objects:
            if on_disk(obj) or obj.flags & UNWRITABLE:
                continue
            pending = self._pending(obj)
            if pending is None:
                place = _place_of(obj)
                if place is None:
                    continue
                if self._is_full(_tier(place.segment)):
                    if self._config.offload_force_evict:
                        self._counters["mooncake_offload_forced_total"] += 1
                        continue
                    self._counters["mooncake_offload_refused_total"] += 1
                    self._refused.append(unit)
                    return 0
                pending = self._order_write(obj, place)
            writes.append(pending)
        if not writes:
            return None
        for pending in writes:
            if not pending.leaving:
                pending.leaving = True
                self._catalog.note_leaving(pending.obj, pending.taken)
                pending.leave(1)
                _tier(pending.segment).leaving += 1
        return sum([pending.taken for pending in writes])

    def _is_full(self, tier: Tier) -> bool:
        """Whether no more writes may be ordered for eviction."""
        limit = self._config.offloading_queue_limit
        return len(tier.pending) >= limit or tier.leaving >= max(1, int(limit * self._config.offload_cap_ratio))

    def _order_write(self, obj: Object, place: _Place) -> Pending:
        obj.flags |= WRITING
        pending = Pending(obj, place.segment, place.seq, place.slot, place.taken, place.parts)
        _tier(place.segment).pending[place.seq] = pending
        pending.order(self._pool.order(place.segment))
        return pending

    def _pending(self, obj: Object) -> Pending | None:
        if not obj.flags & WRITING:
            return None
        for part in parts(obj):
            if part.segment.tier is not None:
                pending = part.segment.tier.pending.get(part.seq or obj.seq)
                if pending is not None:
                    return pending
        return None

    def lose_parts(self, obj: Object, lost: Iterable[PartAt]) -> None:
        """`obj` is about to lose these parts of it: if one is being written, the write is called off."""
        pending = self._pending(obj)
        if pending is not None and any(_is_of(part, pending) for part in lost):
            self._call_off(pending)

    def _call_off(self, pending: Pending) -> None:
        del _tier(pending.segment).pending[pending.seq]
        pending.obj.flags &= ~WRITING
        if pending.leaving:
            self._stays(pending)
        self.drop(pending.segment, pending.seq)

    # -- what became of it

    def report(self, segment: Segment, report: DiskReport, now: float) -> None:
        """Whatever the server of `segment` says has happened, perhaps not for the first time."""
        tier = segment.tier
        if tier is None:
            return
        tier.used, tier.quota, tier.queue, tier.counts = report.used, report.quota, report.queue, report.counts
        dropped = set(report.dropped)
        for seq, key in zip(report.written, report.keys, strict=True):
            if seq not in dropped and seq not in tier.dropping:  # else that was before the order to drop it
                self._written(segment, tier, seq, key, now)
        for seq in dropped:
            tier.dropping.pop(seq, None)
        for seq in report.failed:
            pending = tier.pending.pop(seq, None)
            if pending is not None:
                self._counters["mooncake_offload_failed_total"] += 1
                pending.obj.flags |= UNWRITABLE
                self._end(pending, now)
        for seq, key in zip(report.evicted, report.evicted_keys, strict=True):
            tier.dropping.pop(seq, None)
            self._evicted(segment, seq, key, now)
        self.promotions.report(segment, report.promoted, report.unpromoted, now)
        self._settle_refused(now)

    def _written(self, segment: Segment, tier: Tier, seq: int, key: str, now: float) -> None:
        pending = tier.pending.pop(seq, None)
        obj = self._catalog.objects.get(self._catalog.key_of(key)) if pending is None else pending.obj
        version = seq if pending is None or obj is None else obj.seq
        if obj is None or obj.flags & GONE or not self.attach(obj, segment, seq, version):
            self.drop(segment, seq)
        else:
            self._catalog.changed(obj)
        if pending is not None:
            self._end(pending, now)

    def _end(self, pending: Pending, now: float) -> None:
        """Its write is over; if it was to leave, it leaves now."""
        obj = pending.obj
        obj.flags &= ~WRITING
        if pending.leaving:
            self._stays(pending)
            self._catalog.evict_now(obj.unit(), now)

    def _stays(self, pending: Pending) -> None:
        pending.leaving = False
        self._catalog.note_leaving(pending.obj, -pending.taken)
        pending.leave(-1)
        _tier(pending.segment).leaving -= 1

    def _evicted(self, segment: Segment, seq: int, key: str, now: float) -> None:
        obj = self._catalog.objects.get(self._catalog.key_of(key))
        disk = None if obj is None else obj.disk
        if obj is None or disk is None or disk.segment is not segment or disk.seq != seq:
            return
        self.detach(obj)
        self._counters["mooncake_disk_evicted_total"] += 1
        if in_memory(obj):
            self._catalog.changed(obj)
        else:
            self._catalog.lose(obj, now)

    def _settle_refused(self, now: float) -> None:
        refused, self._refused = self._refused, []
        for unit in refused:
            if not unit.flags & GONE:
                self._catalog.settle(unit, now)

    # -- copies

    def attach(self, obj: Object, segment: Segment, seq: int, version: int) -> bool:
        """The tier of `segment` has, as `seq`, a value of the key of `obj` whose sequence number is `version`.  False:
        that is another value, or there is one copy already."""
        disk = obj.disk
        if disk is not None and disk.seq == seq and disk.segment is segment:
            if not disk.there:
                disk.there = True
                self.values += 1
            return True
        if (obj.seq != version and (disk is None or disk.seq != seq)) or on_disk(obj):
            return False
        self.detach(obj)
        obj.disk = OnDisk(segment, seq, True)
        self.values += 1
        return True

    def detach(self, obj: Object) -> None:
        """The value's copy on disk, if it has one, is none any more."""
        if obj.disk is not None:
            self.values -= obj.disk.there
            obj.disk = None

    def drop(self, segment: Segment, seq: int) -> None:
        """The server of `segment` shall forget the value `seq`."""
        if segment.tier is not None and segment.mounted:
            segment.tier.dropping[seq] = None
            self._pool.order(segment).drop.append(seq)

    def forget(self, obj: Object) -> None:
        """Nobody finds `obj` any more."""
        pending = self._pending(obj)
        if pending is not None:
            self._call_off(pending)
        if obj.disk is not None:
            if on_disk(obj):
                self.drop(obj.disk.segment, obj.disk.seq)
            self.detach(obj)


class _Place(NamedTuple):
    """A whole replica that can be written where it is, or one of its `parts` is, if those are several: the number and
    head slot of its record, and how many bytes it takes."""

    segment: Segment
    seq: int
    slot: int
    taken: int
    parts: Replica = ()


def _place_of(obj: Object) -> _Place | None:
    segment = obj.segment
    if segment is not None:
        if not _takes_values(segment):
            return None
        return _Place(segment, obj.seq, obj.slots >> SLOT_COUNT_BITS, granules(obj.size))
    for replica in sorted(obj.replicas, key=len):  # no gathering if one lies in one piece
        able = [part for part in replica if _takes_values(part.segment)]
        if able:
            part = max(able, key=lambda part: part.taken)
            taken = sum(part.taken for part in replica)
            whole = replica if len(replica) > 1 else ()
            return _Place(part.segment, part.seq or obj.seq, part.slots[0], taken, whole)
    return None


def _takes_values(segment: Segment) -> bool:
    return segment.mounted and segment.tier is not None and segment.tier.filled


def _is_of(part: PartAt, pending: Pending) -> bool:
    """Whether it is `part` that is being written, or one of those."""
    if pending.parts:
        return any(part is one for one in pending.parts)
    return part.segment is pending.segment and (part.seq or pending.obj.seq) == pending.seq


def _tier(segment: Segment) -> Tier:
    assert segment.tier is not None
    return segment.tier
