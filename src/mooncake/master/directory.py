"""The directory of a pool: everything a master knows and decides.  No I/O; the clock is given.

Every method is one atomic step.  What may take long comes as an iterator that does a few milliseconds' work a step;
`background` collects those that the directory starts by itself.  Whoever runs a directory calls `tick` every 10 ms
while it is `busy` (else ten times a second), and sends what `pool.take_outbox()` gives after each step.

    Pool       segments, extents, kills            Catalog    complete values, leases, eviction order
    Puts       puts in progress                    Granting   room for new puts
    Recovery   records of returning segments       Clients    who is connected
    Tasks      replicas being copied or moved     Drains     segments being emptied
    Disks      values on disk
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext

from mooncake.errors import ErrorCode, StoreError
from mooncake.master.catalog import Catalog
from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.disk_recovery import DiskRecovery
from mooncake.master.drains import Drains
from mooncake.master.granting import SEQ_BITS, Granting
from mooncake.master.leases import ReadLease
from mooncake.master.membership import Client, Clients
from mooncake.master.objects import (
    GONE,
    REPLICATING,
    Object,
    in_memory,
    is_leased,
    is_mounted,
    replicas,
)
from mooncake.master.patterns import searcher
from mooncake.master.pool import Pool, Segment
from mooncake.master.purging import purge, purge_disk
from mooncake.master.puts import Puts
from mooncake.master.recovery import Recovery
from mooncake.master.tasks import Tasks
from mooncake.master.tenants.catalog import TenantCatalog
from mooncake.master.tenants.granting import TenantGranting
from mooncake.master.tenants.registry import Tenants
from mooncake.master.tombstones import Tombstones
from mooncake.master.views import SegmentView, Totals, found_at, readable, segment_views, totals_of
from mooncake.rpc.message import Message
from mooncake.rpc.messages import Found, Record, SegmentInfo

log = logging.getLogger("mooncake.master")

_NOT_READY = int(ErrorCode.REPLICA_IS_NOT_READY)
_NOT_FOUND = int(ErrorCode.OBJECT_NOT_FOUND)
_ENDED_AT_ONCE = 2000  # leases that end in one step
_LARGEST_SEGMENT = 1 << 44
_LAST_TERM = 1 << 42  # terms are milliseconds
_LONGEST_LEASE_MS = 3_600_000
_PROBED_AT_ONCE = 128  # entries of a list that may end at any
_REMOVED_AT_ONCE = 250  # 5-8 us each, with the kills


def boot_clock() -> float:
    """Seconds on a clock that runs through suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Directory:
    def __init__(
        self,
        config: MasterConfig,
        counters: Counters,
        clock: Callable[[], float] = boot_clock,
        wall: Callable[[], float] = time.time,
        term: int = 0,  # that this master was elected for; 0: it stands alone, and takes the time for one
    ) -> None:
        self.config = config
        self.counters = counters
        self.clock = clock
        now = clock()
        self.pool = Pool(term or int(wall() * 1000))
        window = config.disk_recovery_window_s if config.enable_offload else config.recovery_window_s
        self.tombstones = Tombstones(window, now)
        self.puts = Puts()
        self.tenants: Tenants | None = None
        self.catalog: Catalog
        self.granting: Granting
        if config.tenant_quotas is None:
            self.catalog = Catalog(config, counters, self.pool, self.tombstones)
            self.granting = Granting(config, counters, self.pool, self.catalog, self.puts)
        else:
            self.tenants = Tenants(config.tenant_quotas, self.pool)
            catalog = self.catalog = TenantCatalog(config, counters, self.pool, self.tombstones, self.tenants)
            self.granting = TenantGranting(config, counters, self.pool, catalog, self.puts, self.tenants)
        self.recovery = Recovery(self.pool, self.catalog, self.granting, self.tombstones, clock, wall)
        self.granting.spare = self.recovery.spare
        self.disks = self.catalog.disks
        self.disks.promotions.next_seq = self.granting.next_seq
        self.disk_recovery = DiskRecovery(self.catalog, self.granting, self.tombstones, clock)
        self.catalog.newest_seq = lambda: self.granting.last_seq
        self.clients = Clients(config.client_gone_s)
        self.tasks = Tasks(config, self.pool, self.catalog, self.granting, clock, wall)
        self.background: deque[Iterator[None]] = deque()
        self.drains = Drains(counters, self.pool, self.catalog, self.puts, self.tasks, self.background, clock, wall)
        self._next_check = now
        self.on_expired: Callable[[str], None] = lambda segment: None

    # -- views, without any effect

    @property
    def term(self) -> int:
        return self.pool.term

    @property
    def quarantined_bytes(self) -> int:
        return self.pool.quarantined

    def segments(self) -> list[SegmentView]:
        return segment_views(self.pool)

    def totals(self) -> Totals:
        return totals_of(self)

    def keys(self) -> Iterator[list[str]]:
        """All readable keys in lists of at most 2,000; other things may happen between two lists."""
        for objects in self.catalog.objects.slices():
            yield [obj.key for obj in objects]

    def peek(self, key: str) -> Found | None:
        """Where a value is, without leasing it; `states` filled.  None: it cannot be read."""
        obj = self.catalog.objects.get(key)
        return None if obj is None else found_at(obj, with_states=True)

    def segment_infos(self, numbers: list[int]) -> list[SegmentInfo]:
        segments = self.pool.segments
        return [segments[number].info for number in numbers if number in segments]

    # -- reading

    def exist(self, keys: list[str], now: float) -> bytes:
        """One byte a key: 1 readable, and now under a probe lease."""
        found = self.find(keys)
        self.catalog.probes.touch(list(filter(None, found)), now)
        return bytes(map(bool, found))

    def find(self, keys: list[str]) -> list[Object | None]:
        """What is readable under these keys; nothing is leased."""
        found = self.catalog.objects.find_many(keys)
        if self.catalog.purging:
            found = [None if obj is None or not readable(obj) else obj for obj in found]
        return found

    def prefix(self, heads: list[str], tails: list[str], now: float, *, lease: bool = True) -> int:
        """How many of the first `tails` are readable with every head; those get a probe lease, if `lease` says so."""
        length, objects = 0, list[Object]()
        for at in range(0, len(tails), _PROBED_AT_ONCE):
            some = tails[at : at + _PROBED_AT_ONCE]
            found = self.find([head + tail for tail in some for head in heads])
            whole = found.index(None) // len(heads) if None in found else len(some)
            objects += filter(None, found[: whole * len(heads)])
            length += whole
            if whole < len(some):
                break
        if lease:
            self.catalog.probes.touch(objects, now)
        return length

    def answers_as(self, version: int, until: float) -> bool:
        """Whether `exist` would answer, and lease, just as when it was asked last; see `mark`."""
        catalog = self.catalog
        return catalog.objects.version == version and not catalog.purging and self.clock() < until

    def mark(self) -> tuple[int, float]:
        """(version, until) for `answers_as`: the keys that are there, and the end of the moment in which all
        probe leases end together."""
        return self.catalog.objects.version, self.catalog.probes.moment_ends

    def begin_read(self, now: float, client: str = "") -> ReadLease:
        """The lease for one GetStart of `client`; end it at once if nothing was found."""
        return self.catalog.reads.begin(now, client)

    def read(self, keys: list[str], lease: ReadLease, now: float) -> list[int | Found]:
        """Where the values are; those found are under `lease` and a probe lease."""
        answers, objects = self._find(keys, with_states=False)
        self.catalog.lease_for_reading(objects, lease, now)
        counters = self.counters
        counters["total_get_nums_"] += len(keys)
        counters["valid_get_nums_"] += len(objects)
        if self.catalog.only_on_disk:
            from_disk = [obj for obj in objects if not in_memory(obj)]
            objects = [obj for obj in objects if in_memory(obj)]
            counters["file_cache_hit_nums_"] += len(from_disk)
            counters["file_cache_hit_bytes_total"] += sum([obj.size for obj in from_disk])
            for obj in from_disk:
                self.disks.promotions.hit(obj)
        size, hits = sum([obj.size for obj in objects]), len(objects)
        counters["mem_cache_hit_nums_"] += hits
        counters["mem_cache_hit_bytes_total"] += size
        return answers

    def query(self, keys: list[str], now: float) -> list[int | Found]:
        """As read with each replica's state, under probe leases only."""
        answers, objects = self._find(keys, with_states=True)
        self.catalog.probes.touch(objects, now)
        return answers

    def end_read(self, numbers: list[int], now: float, client: str = "") -> None:
        """`client` hands these leases back; those of others stay."""
        for number in numbers:
            if self.catalog.reads.holder(number) == client:
                self.catalog.end_reading(number, now)

    def _find(self, keys: list[str], *, with_states: bool) -> tuple[list[int | Found], list[Object]]:
        answers: list[int | Found] = []
        objects: list[Object] = []
        for key, obj in zip(keys, self.catalog.objects.find_many(keys), strict=True):
            found = None if obj is None else found_at(obj, with_states=with_states)
            if obj is not None and found is not None:
                answers.append(found)
                objects.append(obj)
            elif key in self.puts.by_key:
                answers.append(_NOT_READY)
            else:
                answers.append(_NOT_FOUND)
        return answers, objects

    # -- the end of a put

    def lost_replicas(self, lost: list[int]) -> dict[int, set[int]]:
        """[seq, replica, ...] of PutEnd as a set a put."""
        by_seq: dict[int, set[int]] = {}
        for i in range(0, len(lost) - 1, 2):
            by_seq.setdefault(lost[i], set()).add(lost[i + 1])
        return by_seq

    def end_puts(self, seqs: list[int], lost: dict[int, set[int]], client: Client, now: float) -> list[int]:
        """These puts' values are whole, but for the `lost` replicas.  The first shall leave last."""
        return [self._end_put(seq, lost.get(seq), client, now) for seq in reversed(seqs)][::-1]

    def _end_put(self, seq: int, lost: set[int] | None, client: Client, now: float) -> int:
        put = self.puts.by_seq.get(seq)
        if put is None:
            name = self.puts.ended_by(seq)
            if name is None:
                return ErrorCode.INVALID_WRITE
            return ErrorCode.OK if name == client.name else ErrorCode.ILLEGAL_CLIENT
        if put.client is not client:
            return ErrorCode.ILLEGAL_CLIENT
        obj = put.obj
        if lost or obj.segment is None or not obj.segment.mounted:
            dead = lost or set()
            if not self.catalog.lose_replicas(obj, lambda i, r: i in dead or not is_mounted(r), now):
                self.granting.revoke(put, now)
                return ErrorCode.REPLICA_IS_GONE
        existing = self.catalog.objects.get(obj.key)
        if existing is not None:  # announced by a segment that returned meanwhile
            self.catalog.forget(existing, now)
        self.catalog.insert(obj, put.group, now + put.soft_pin_s if put.soft_pin_s else 0.0, now)
        self.granting.close(put)
        if put.group:
            self.catalog.settle(obj.unit(), now)
        if self.config.enable_offload:
            self.disks.put_ended(obj)
        self.puts.remember(put)
        counters = self.counters
        counters.value_sizes[min((obj.size - 1).bit_length(), 63)] += 1
        counters.value_bytes += obj.size
        return ErrorCode.OK

    def revoke_puts(self, seqs: list[int], client: Client, now: float) -> list[int]:
        """Forget these puts."""
        codes = []
        for seq in seqs:
            put = self.puts.by_seq.get(seq)
            if put is None:
                codes.append(int(ErrorCode.INVALID_WRITE))
            elif put.client is not client:
                codes.append(int(ErrorCode.ILLEGAL_CLIENT))
            else:
                self.granting.revoke(put, now)
                codes.append(int(ErrorCode.OK))
        return codes

    # -- removing

    def remove(self, keys: list[str], force: bool, now: float) -> list[int]:
        return [self._remove(key, force, now) for key in keys]

    def _remove(self, key: str, force: bool, now: float) -> int:
        obj = self.catalog.objects.get(key)
        if obj is None:
            if key in self.puts.by_key:
                return ErrorCode.REPLICA_IS_NOT_READY
            self.tombstones.note(key, self.granting.last_seq)
            return ErrorCode.OBJECT_NOT_FOUND
        if obj.flags & REPLICATING:
            return ErrorCode.OBJECT_HAS_REPLICATION_TASK
        if not force and is_leased(obj, now):
            return ErrorCode.OBJECT_HAS_LEASE
        self.catalog.forget(obj, now)
        return ErrorCode.OK

    def remove_all(self, force: bool, scope: str = "") -> Generator[None, None, int]:
        """Remove every value of a scope (that is not leased); how many, in steps."""
        if force:
            if scope:
                self.tombstones.note_scope(scope, self.granting.last_seq)
            else:
                self.tombstones.raise_floor(self.granting.last_seq)
            now = self.clock()
            self.recovery.give_up(now, now, scope)
        if scope:
            return self._remove_if(lambda key: key.startswith(scope), force)
        return self._clear(force)

    def _clear(self, force: bool) -> Generator[None, None, int]:
        events = self.catalog.events
        with nullcontext() if events is None else events.clearing():
            return (yield from self._remove_if(lambda _: True, force))

    def remove_regex(self, pattern: str, force: bool, scope: str = "") -> Generator[None, None, int]:
        """Remove the values of a scope in whose keys `pattern` is found; how many, in steps.  Linear in the key's
        length."""
        search = searcher(pattern)
        if not scope:
            return self._remove_if(lambda key: search(key) is not None, force)
        return self._remove_if(lambda key: key.startswith(scope) and search(key[len(scope) :]) is not None, force)

    def _remove_if(self, matches: Callable[[str], bool], force: bool) -> Generator[None, None, int]:
        removed = 0
        for some in self.catalog.objects.slices():
            for at in range(0, len(some), _REMOVED_AT_ONCE):
                now = self.clock()
                for obj in some[at : at + _REMOVED_AT_ONCE]:
                    if obj.flags & GONE:
                        continue
                    if not force and is_leased(obj, now):
                        self.catalog.changed(obj)
                    elif matches(obj.key):
                        self.catalog.forget(obj, now)
                        removed += 1
                yield
        return removed

    # -- members

    def mount(
        self, info: SegmentInfo, term: int, lease_ms: int, send: Callable[[Message], None], now: float
    ) -> tuple[Segment, bool]:
        """A server serves a segment, and last served it under master `term`.  Second: nothing is to be announced.

        Raises StoreError INVALID_VERSION if our term was too low; it is higher now, so the server shall
        say Hello again.
        """
        if info.segment <= 0 or not 0 < info.size <= _LARGEST_SEGMENT or not info.name or not 0 <= term < _LAST_TERM:
            raise StoreError(ErrorCode.INVALID_PARAMS, f"impossible segment {info.name[:200]!r} of {info.size} bytes")
        if term > self.pool.term:
            self.pool.term = term + 1
            self.granting.skip_to(self.pool.term << SEQ_BITS)
            self.tombstones.outbid(self.granting.last_seq)
            self.pool.refresh(now)
            raise StoreError(ErrorCode.INVALID_VERSION, f"term is {self.pool.term} from now on; say Hello again")
        known = self.pool.segments.get(info.segment)
        if known is not None:
            if known.send is not None and known.client != info.client:
                raise StoreError(ErrorCode.SEGMENT_ALREADY_EXISTS, f"segment {info.name} is served already")
            if known.term == term and known.filled and known.size == info.size:
                self._resume(known, info, send, now)
                return known, True
            self._lose(known, now)
        segment = Segment(info, self.pool.term, now, known=term == 0)
        segment.send = send
        segment.first_seq = self.granting.last_seq + 1
        if term:
            self.granting.expect_others(now)
            segment.old_until = now + max(min(lease_ms, _LONGEST_LEASE_MS), self.config.lease_ms) / 1000
            self.granting.stay_calm(segment.old_until)
        self.pool.add(segment, now)
        log.info("client_id=%s, action=mount_segment, segment_name=%s", info.client, info.name)
        return segment, term == 0

    def _resume(self, segment: Segment, info: SegmentInfo, send: Callable[[Message], None], now: float) -> None:
        segment.info, segment.name, segment.client, segment.host = info, info.name, info.client, info.host
        segment.send, segment.heard, segment.term = send, now, self.pool.term
        self.pool.post_again(segment)
        self.catalog.unpark(segment, now)
        self.pool.refresh(now)
        log.info("client_id=%s, action=remount_segment, segment_name=%s", info.client, info.name)

    def announce(self, segment: Segment, records: list[Record], last: bool) -> Iterator[None]:
        """Take `records` in, in steps; after the `last` ones `background` makes it ready for new values."""
        yield from self.recovery.announce(segment, records)
        if last and not segment.announced and segment.mounted:
            segment.announced = True
            self.background.append(self.recovery.fill(segment))

    def heartbeat(self, segment: Segment, now: float) -> bool:
        """Whether `segment` is mounted (still, by this server)."""
        if not segment.mounted:
            return False
        segment.heard = now
        return True

    def disconnect(self, segment: Segment, now: float) -> None:
        """The connection of its server was closed."""
        if segment.mounted:
            segment.send = None
            segment.deadline = now + min(self.config.client_ttl_s, self.config.closed_ttl_s)
            self.pool.refresh(now)

    def retire(self, segment: Segment, now: float) -> None:
        """Nothing new is placed in it; what is there stays readable until it is unmounted."""
        segment.draining = segment.retiring = True
        self.pool.refresh(now)

    def unmount_disk(self, segment: Segment, now: float) -> None:
        """What is on its server's disk is not read any more."""
        if segment.tier is not None:
            log.info("segment_name=%s, action=unmount_local_disk", segment.name)
            self.disks.lose(segment, now)
            self.background.append(purge_disk(self.catalog, segment, self.clock))

    def unmount(self, segment: Segment, now: float) -> None:
        """Its server gives the segment up: its values are gone (`background` has the rest of the work)."""
        if segment.mounted:
            log.info("client_id=%s, action=unmount_segment, segment_name=%s", segment.client, segment.name)
            self._drop(segment, now)

    def _lose(self, segment: Segment, now: float) -> None:
        self.tombstones.lost(segment.number, {slot: d.seq for slot, d in segment.doomed.items()}, now)
        self._drop(segment, now)

    def _drop(self, segment: Segment, now: float) -> None:
        self.disks.lose(segment, now)
        self.pool.drop(segment, now)
        self.recovery.forget(segment)
        for put in list(self.puts.by_seq.values()):
            if not any(is_mounted(replica) for replica in replicas(put.obj)):
                self.granting.revoke(put, now)
        self.background.append(purge(self.catalog, segment, self.clock))

    def killed(self, segment: Segment, slots: list[int], seqs: list[int]) -> None:
        """An owner confirms kills; puts may have been waiting for it (`granting.serve`)."""
        self.pool.killed(segment, slots, seqs)

    # -- time

    @property
    def busy(self) -> bool:
        return (
            self.granting.busy
            or self.tasks.busy
            or self.drains.busy
            or bool(self.catalog.probes)
            or bool(self.catalog.reads)
        )

    def tick(self, now: float) -> None:
        """Whatever is due."""
        self.catalog.end_leases(now, _ENDED_AT_ONCE)
        self.catalog.end_soft_pins(now, _ENDED_AT_ONCE)
        self.pool.kill_due(now, _ENDED_AT_ONCE)
        self.move_on(now)
        if now >= self._next_check:
            self._next_check = now + 0.25
            self._check(now)

    def move_on(self, now: float) -> None:
        """Go on with tasks and drain jobs."""
        if self.drains.busy:
            self.drains.tick(now)
        self.tasks.tick(now)

    def _check(self, now: float) -> None:
        for segment in list(self.pool.segments.values()):
            deadline = segment.deadline if segment.suspect else segment.heard + self.config.client_ttl_s
            if now >= deadline:
                log.info("client_id=%s, action=client_expired", segment.client)
                log.info("action=unmount_expired_mem_segment, segment_name=%s", segment.name)
                self.on_expired(segment.name)
                self._lose(segment, now)
        self.pool.refresh(now)
        while (client := self.clients.gone(now)) is not None:
            for seq in sorted(client.puts):
                self.granting.revoke(self.puts.by_seq[seq], now)
        latest = now - self.config.put_start_release_timeout_s
        while (put := self.puts.oldest()) is not None and put.started <= latest:
            self.counters["master_put_start_release_cnt"] += 1
            self.granting.revoke(put, now)
        self.recovery.give_up(now - self.config.assembly_s, now)
        self.tombstones.expire(now, self.granting.last_seq)
