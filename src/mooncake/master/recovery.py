"""Filling the directory from the tables of segments that were served by another master, or that had expired.

Each record is checked before it is believed: its slots and extents must be free and in range, else it is killed and
logged.  Of several records of a key the highest sequence number wins (sequence numbers grow with the term).

    WRITING     its extents are quarantined; killed at once (the owner confirms when the writer is gone)
    REMOVED     its extents are held until no reader of the former master can be left; then killed
    COMPLETE    becomes (part of) an object, unless it was removed or put again meanwhile.  A value in several
                parts is listed when all are there
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import compress
from operator import not_

import msgspec

from mooncake.master.catalog import Catalog
from mooncake.master.granting import Granting
from mooncake.master.objects import HARD_PIN, SLOT_COUNT_BITS, Object, OnDisk, PartAt, Replica, lay, with_checksum
from mooncake.master.plain import Plain
from mooncake.master.pool import Pool, Segment
from mooncake.master.tombstones import Tombstones
from mooncake.rpc.messages import Record
from mooncake.rpc.record_messages import Body
from mooncake.transfer.table import COMPLETE, REMOVED, WRITING

log = logging.getLogger("mooncake.master")

_SLOTS_TAKEN = "its slots are taken or out of range"
_EXTENTS_TAKEN = "its extents are taken or out of range"
_AT_ONCE = 200  # records in one step (5-8 us each)
_PLAIN_AT_ONCE = 500  # (2-3 us each)


class Assembly(msgspec.Struct, eq=False):
    """The parts, so far, of one replica of a value that lies in several parts."""

    started: float
    parts: dict[int, PartAt]


class Recovery:
    """Takes announced records in."""

    def __init__(
        self,
        pool: Pool,
        catalog: Catalog,
        granting: Granting,
        tombstones: Tombstones,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._catalog = catalog
        self._granting = granting
        self._tombstones = tombstones
        self._clock = clock
        self._wall = wall
        self._clients: dict[str, str] = {}  # one text for all values of a client
        self._assemblies: dict[tuple[str, int, int], Assembly] = {}  # (key, seq, replica)

    def announce(self, segment: Segment, records: list[Record]) -> Iterator[None]:
        """Take `records` in, in steps."""
        for at in range(0, len(records), _AT_ONCE):
            now = self._clock()
            if not self._goes_on(segment, now):
                return
            for record in records[at : at + _AT_ONCE]:
                self._take(segment, record, now)
            yield

    def announce_plain(self, segment: Segment, records: Plain) -> Iterator[None]:
        """The same of plain records."""
        for at in range(0, len(records.keys), _PLAIN_AT_ONCE):
            now = self._clock()
            if not self._goes_on(segment, now):
                return
            self._take_together(segment, records.some(at, at + _PLAIN_AT_ONCE), now)
            yield

    def _goes_on(self, segment: Segment, now: float) -> bool:
        if segment.announced or not segment.mounted:
            return False
        segment.heard = now  # it has no time for heartbeats
        self._granting.expect_others(now)
        return True

    def fill(self, segment: Segment) -> Iterator[None]:
        """All of its records are in: find out, in steps, what is free, so that it may be used for new values."""
        for step, _ in enumerate(segment.allocator.find_holes()):
            if step % 100 == 99:
                yield
        yield from segment.slots.find_free()
        segment.filled = True
        self._tombstones.undelivered.pop(segment.number, None)
        self._pool.refresh(self._clock())

    def _take_together(self, segment: Segment, records: Plain, now: float) -> None:
        """As `_take` of each, which takes three times as long: nearly all records of a large pool come through here."""
        if not (self._catalog.takes_plain and records.sound):
            self._take_each(segment, records, [True] * len(records.keys), now)
            return
        if not self._tombstones.quiet:
            kills, number = self._tombstones.kills, segment.number
            dead = [
                kills(number, run >> SLOT_COUNT_BITS, key, "", seq, seq)
                for run, key, seq in zip(records.slots, records.keys, records.seqs, strict=True)
            ]
            records = self._take_each(segment, records, dead, now)
        free = segment.slots.reserve_runs(records.slots)
        if not all(free):
            for record in compress(map(records.record, range(len(free))), map(not_, free)):
                self._doubt(segment, record, _SLOTS_TAKEN)
            records = records.of(free)
        free = segment.allocator.reserve_each(records.offsets, records.sizes)
        if not all(free):
            for record in compress(map(records.record, range(len(free))), map(not_, free)):
                self._kill_doubtful(segment, record, _EXTENTS_TAKEN)
            records = records.of(free)
        if not records.keys:
            return
        highest = max(records.seqs)
        self._granting.skip_to(highest)
        segment.first_seq = max(segment.first_seq, highest + 1)
        client = self._clients.setdefault(records.client, records.client)
        objects = [  # by position, since that takes half the time: Unit's fields, then its own
            Object(0.0, 0, 0, None, None, key, size, seq, segment, offset, run, (), None, client)
            for key, size, seq, offset, run in zip(
                records.keys, records.sizes, records.seqs, records.offsets, records.slots, strict=True
            )
        ]
        if records.checksums:
            objects = list(map(with_checksum, objects, records.checksums))
        for i in self._catalog.insert_plain(objects, now):
            self._believe(segment, records.record(i), now)

    def _take_each(self, segment: Segment, records: Plain, which: list[bool], now: float) -> Plain:
        """Take these one by one; the others."""
        if not any(which):
            return records
        for record in compress(map(records.record, range(len(which))), which):
            self._take(segment, record, now)
        return records.of(list(map(not_, which)))

    def _take(self, segment: Segment, record: Record, now: float) -> None:
        if not record.slots:
            return
        body = self._catalog.known_as(record.body)
        if body is not record.body:
            record = Record(record.slots, record.state, record.term, record.seq, body)
        problem = _problem(record)
        if not segment.slots.reserve(record.slots):
            self._doubt(segment, record, _SLOTS_TAKEN)
        elif problem is not None or not segment.allocator.reserve(record.body.extents):
            self._kill_doubtful(segment, record, problem or _EXTENTS_TAKEN)
        else:
            self._believe(segment, record, now)

    def _kill_doubtful(self, segment: Segment, record: Record, problem: str) -> None:
        """Its slots were free."""
        self._pool.kill_unread(PartAt(segment, tuple(record.slots), ()), record.seq, clean=False)
        self._doubt(segment, record, problem)

    def _doubt(self, segment: Segment, record: Record, problem: str) -> None:
        log.warning("segment %s: record of key %r is not believed: %s", segment.name, record.body.key[:200], problem)

    def _believe(self, segment: Segment, record: Record, now: float) -> None:
        """Its slots and extents are reserved."""
        slot, seq, body = record.slots[0], record.seq, record.body
        version = body.version or seq
        part = PartAt(segment, tuple(record.slots), tuple(body.extents), 0 if version == seq else seq)
        self._granting.skip_to(seq)
        segment.first_seq = max(segment.first_seq, seq + 1)
        if record.state == WRITING:
            self._pool.kill_unread(part, seq, clean=False)
        elif record.state == REMOVED:
            self._pool.kill_after(part, seq, segment.old_until)
        elif self._tombstones.kills(
            segment.number, slot, body.key, body.group, seq, version
        ) or not self._catalog.takes(body):
            self._pool.kill(part, seq, now, clean=True)
        else:
            self._adopt(part, record, version, now)

    def _adopt(self, part: PartAt, record: Record, seq: int, now: float) -> None:
        """`seq`: the value's."""
        body = record.body
        existing = self._catalog.objects.get(body.key)
        if existing is not None and existing.seq > seq:
            self._pool.kill(part, seq, now, clean=True)
            return
        replica: Replica = (part,)
        if body.parts > 1:
            whole = self._assemble(part, record, seq, now)
            if whole is None:
                return
            replica = whole
        if existing is not None and existing.seq == seq:
            self._catalog.add_replicas(existing, (replica,), now)
            _link(existing, part, body)
            return
        if existing is not None:
            self._catalog.forget(existing, now)
        obj = Object(key=body.key, size=body.size, seq=seq, flags=HARD_PIN if body.hard_pin else 0)
        obj = with_checksum(obj, body.checksum)
        obj.client = self._clients.setdefault(body.client, body.client)
        lay(obj, (replica,))
        _link(obj, part, body)
        self._catalog.insert(obj, body.group, self._soft_until(body, now), now)

    def _soft_until(self, body: Body, now: float) -> float:
        """The end of what is left of a soft pin; 0 without one."""
        if not body.soft_pin_since > 0:
            return 0.0
        age = max(0.0, self._wall() - body.soft_pin_since)
        return now + self._granting.soft_pin_s(body.soft_pin_ttl_ms) - age

    def _assemble(self, part: PartAt, record: Record, seq: int, now: float) -> Replica | None:
        """The replica if `part` was the last one missing."""
        body = record.body
        name = (body.key, seq, body.replica)
        assembly = self._assemblies.setdefault(name, Assembly(now, {}))
        if body.part in assembly.parts:
            self._pool.kill(part, record.seq, now, clean=True)
            return None
        assembly.parts[body.part] = part
        if len(assembly.parts) < body.parts:
            return None
        del self._assemblies[name]
        replica = tuple(assembly.parts[i] for i in range(body.parts))
        if sum(sum(part.extents[1::2]) for part in replica) == body.size:
            return replica
        self._kill_all(replica, record.seq, now)
        return None

    def give_up(self, latest_start: float, now: float, scope: str = "") -> None:
        """Kill the parts, of keys that start with `scope`, that have waited since before `latest_start` for those that
        are missing."""
        for name, assembly in list(self._assemblies.items()):
            if assembly.started <= latest_start and name[0].startswith(scope):
                del self._assemblies[name]
                self._kill_all(assembly.parts.values(), name[1], now)

    def spare(self, room: int, latest_start: float, now: float) -> int:
        """A put has no other room: give up as many parts as hold `room` bytes, those that have waited longest first;
        how many bytes will come free."""
        freed = 0
        for name, assembly in list(self._assemblies.items()):
            if freed >= room or assembly.started > latest_start:
                break
            freed += sum(part.taken for part in assembly.parts.values())
            del self._assemblies[name]
            self._kill_all(assembly.parts.values(), name[1], now)
        return freed

    def forget(self, segment: Segment) -> None:
        """`segment` is lost, and the parts that it had announced with it."""
        for name, assembly in list(self._assemblies.items()):
            assembly.parts = {i: part for i, part in assembly.parts.items() if part.segment is not segment}
            if not assembly.parts:
                del self._assemblies[name]

    def _kill_all(self, parts: Iterable[PartAt], seq: int, now: float) -> None:
        for part in parts:
            self._pool.kill(part, seq, now, clean=True)


def _link(obj: Object, part: PartAt, body: Body) -> None:
    """A record that was promoted says which value on its server's disk is the same."""
    if body.from_disk and body.parts == 1 and obj.disk is None:
        obj.disk = OnDisk(part.segment, body.from_disk, there=False)


def _problem(record: Record) -> str | None:
    """Why a record cannot be right by itself."""
    body = record.body
    lengths = body.extents[1::2]
    if record.state not in (WRITING, COMPLETE, REMOVED) or not 0 < record.seq < 1 << 62:
        return "unknown state or sequence number"
    if not body.key or not lengths or len(body.extents) % 2 or min(lengths) <= 0:
        return "no key or no extents"
    if not (0 <= body.part < body.parts and body.replica >= 0):
        return "impossible part"
    if sum(lengths) > body.size or (body.parts == 1 and sum(lengths) != body.size):
        return "its extents do not hold its size"
    return None
