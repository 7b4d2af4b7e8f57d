"""The SSD tier of one segment server: what the master orders is queued here, done by two threads, and reported.

    link thread       mount, orders, reports
    compaction        what is alive in files that are mostly dead (see `compaction`)
    writer threads    records from memory to disk; promotions from disk to memory
    stream threads    `stage`: values from disk to the staging memory, for who asked

A record that is being written or filled is *held*: its owner does not call it dead meanwhile.  What came of an order is
kept until the master has acknowledged the report with it.
"""

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from mooncake.errors import ConfigError, ErrorCode, StoreError, TransferError
from mooncake.rpc.disk_messages import (
    DiskAnnounce,
    DiskMount,
    DiskMounted,
    DiskOrders,
    DiskRecord,
    DiskReport,
    DiskSettings,
    Gather,
    Promotion,
    Stage,
    Staged,
)
from mooncake.rpc.messages import Hello
from mooncake.rpc.record_messages import Body
from mooncake.segment.disk.compaction import Compactor
from mooncake.segment.disk.files import Files, blocks
from mooncake.segment.disk.gather import gathered
from mooncake.segment.disk.home import Home, quota_of, settle
from mooncake.segment.disk.log import DiskFullError, DiskLog
from mooncake.segment.disk.packing import Packer, Value
from mooncake.segment.disk.promote import promote
from mooncake.segment.disk.records import Record, runs
from mooncake.segment.disk.staging import Staging
from mooncake.segment.owner import Owner
from mooncake.transfer import table

logger = logging.getLogger("mooncake.segment")

WRITERS = 2
BATCH = 8 << 20  # bytes of values written at once
BATCH_VALUES = 512
READ_STEP = 8 << 20  # bytes read at once
STAGE_WAIT = 2.0  # seconds that a reader waits for room
_ANNOUNCED_AT_ONCE = 1000
_REPORT_S = 1.0  # figures are reported this often, though nothing else is
_UNLIMITED = 1 << 62
_COMPACTION_PAUSE = 1.0  # seconds until it is looked for sparse files again
_LOST_LATER = "values stay in memory, and are lost when they are evicted from there"
_GATHER_TRIES = 2  # a server that had to be left alone for a moment
_NOT_GATHERED = (OSError, EOFError, ValueError, StoreError, TransferError)

_decode = msgspec.msgpack.Decoder(Body).decode


class Tier:
    """`ready` once what is on disk is known.  `wake` rouses the link thread: there is something to report."""

    def __init__(
        self, settings: DiskSettings, start: int, owner: Owner, hello: Hello, wake: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._owner = owner
        self._hello = hello
        self._wake = wake
        self.log: DiskLog | None = None
        self.staging = Staging(start, settings.staging, settings.ttl_ms / 1e3)
        self._number = 0
        self._path = settings.path
        self._work = threading.Condition()
        self._running = True
        self._stopped = threading.Event()
        self._home: Home | None = None
        self._writes: deque[tuple[int, int]] = deque()  # (slot, seq)
        self._promotions: deque[tuple[Promotion, int]] = deque()  # with the term
        self._gathers: deque[tuple[Gather, int]] = deque()  # likewise
        self._under_way: set[int] = set()  # seqs of writes and of promotions, queued or begun
        self._cancelled: set[int] = set()  # of those, values that are to be dropped
        self._outcome = DiskReport(owner.segment)
        self._sent: DiskReport | None = None
        self._sent_at = 0.0
        self._complained = 0.0

    @property
    def ready(self) -> bool:
        return self.log is not None

    @property
    def queued(self) -> int:
        """Values that wait to be written."""
        return len(self._writes) + len(self._gathers)

    def start(self) -> None:
        threading.Thread(target=self._open, name="mooncake-disk", daemon=True).start()

    def stop(self) -> None:
        """Write nothing any more; the directory is let go of with the process."""
        with self._work:
            self._running = False
            self._work.notify_all()
        self._stopped.set()

    def leave(self) -> None:
        """Stop, and let go of the directory when those who were told of values here can have read them no longer."""
        self.stop()
        lease = self._owner.memory.table.lease_ms / 1e3
        end = threading.Timer(lease + self.staging.ttl, self._close)
        end.daemon = True
        end.start()

    def _close(self) -> None:
        log, self.log = self.log, None
        if log is not None:
            log.close()
        if self._home is not None:
            os.close(self._home.lock)

    def _open(self) -> None:
        started = time.monotonic()
        try:
            home = settle(self._settings)
            files = Files(home.direct)
            log = DiskLog(home.path, files, self._settings.file_limit, _UNLIMITED, self._settings.keys_limit)
            log.lru = self._settings.lru
            log.recover()
        except (OSError, ConfigError) as error:
            logger.error("there is no SSD tier: %s", error)
            return
        self._home, self._number, self._path = home, home.number, home.path
        logger.info(
            "SSD tier %s: %d values, %d MiB found in %.2f s, %d damaged entries; %s I/O",
            home.path, len(log), log.used >> 20, time.monotonic() - started, log.counts.torn,
            "direct" if home.direct else "buffered",
        )  # fmt: skip
        self.log = log
        for i in range(WRITERS):
            threading.Thread(target=self._run, args=(log,), name=f"mooncake-disk-{i}", daemon=True).start()
        if self._settings.compaction:
            compactor = Compactor(log, files, self._pace)
            threading.Thread(target=self._compact, args=(compactor,), name="mooncake-disk-compact", daemon=True).start()
        self._wake()

    # -- the link's thread

    def mount(self) -> DiskMount:
        assert self.log is not None
        return DiskMount(self._owner.segment, self._number, self.log.used, self._path)

    def mounted(self, reply: DiskMounted) -> Iterator[DiskAnnounce]:
        """The master's answer to `mount`; what it is to be told now."""
        log = self.log
        assert log is not None
        log.may_evict = reply.evict
        log.set_quota(quota_of(self._settings, reply.quota, self._path, log.used))
        if reply.resumed:
            return
        with self._work:  # another master, or one that had forgotten us: it orders anew
            begun = self._under_way - {seq for _, seq in self._writes} - {p.seq for p, _ in self._promotions}
            begun -= {gather.seq for gather, _ in self._gathers}
            self._writes.clear()
            self._gathers.clear()
            self._promotions.clear()
            self._under_way = begun
            self._outcome, self._sent = DiskReport(self._owner.segment), None
            log.take_evicted()
        records = iter(log.records())
        some = [_announced(record) for record in islice(records, _ANNOUNCED_AT_ONCE)]
        while True:
            following = [_announced(record) for record in islice(records, _ANNOUNCED_AT_ONCE)]
            yield DiskAnnounce(self._owner.segment, some, not following)
            if not following:
                return
            some = following

    def order(self, orders: DiskOrders) -> None:
        log = self.log
        if log is None:
            return
        term = self._owner.memory.table.term
        with self._work:
            for slot, seq in zip(orders.slots, orders.seqs, strict=True):
                if self._is_new(log, seq):
                    self._writes.append((slot, seq))
            for gather in orders.gather:
                if self._is_new(log, gather.seq):
                    self._gathers.append((gather, term))
            for seq in orders.drop:
                if seq in self._under_way:
                    self._cancelled.add(seq)
                else:
                    log.remove(seq)
                    self._outcome.dropped.append(seq)
            for promotion in orders.promote:
                if promotion.seq not in self._under_way:
                    self._under_way.add(promotion.seq)
                    self._promotions.append((promotion, term))
            self._work.notify_all()
        if orders.drop:
            self._wake()

    def _is_new(self, log: DiskLog, seq: int) -> bool:
        """Whether the write of `seq`, just ordered, is to be queued."""
        record = log.find(seq)
        if record is not None:
            self._written(seq, record.key)
        elif seq not in self._under_way:
            self._under_way.add(seq)
            return True
        return False

    def report(self) -> DiskReport | None:
        """What the master is to be told now, if it has acknowledged what it was told before."""
        log = self.log
        if log is None or self._sent is not None:
            return None
        evicted = log.take_evicted()
        with self._work:
            outcome = self._outcome
            told = evicted or outcome.written or outcome.failed or outcome.dropped
            told = told or outcome.promoted or outcome.unpromoted
            if not told and time.monotonic() < self._sent_at + _REPORT_S:
                return None
            self._outcome = DiskReport(self._owner.segment)
            outcome.evicted += [seq for seq, _ in evicted]
            outcome.evicted_keys += [key for _, key in evicted]
            outcome.queue = self.queued
        outcome.used, outcome.quota, outcome.counts = log.used, log.quota, log.counts.by_name()
        self._sent, self._sent_at = outcome, time.monotonic()
        return outcome

    def unacknowledged(self) -> DiskReport | None:
        """The report that was sent last, if nobody has said that it arrived."""
        return self._sent

    def acknowledged(self) -> None:
        self._sent = None

    # -- writing

    def _run(self, log: DiskLog) -> None:
        packer = Packer(self._owner.memory, log)
        while True:
            with self._work:
                while self._running and not (self._writes or self._gathers or self._promotions):
                    self._work.wait()
                if not self._running:
                    return
                promotion = self._promotions.popleft() if self._promotions else None
                gather = self._gathers.popleft() if self._gathers and promotion is None else None
                batch = None if promotion is not None else self._take_writes()
            if promotion is not None:
                self._promote(log, *promotion)
            if batch is not None:
                self._write(log, packer, *batch)
            if gather is not None:
                self._gather(log, packer, *gather)
            self._wake()

    def _take_writes(self) -> tuple[list[Value], list[int]]:
        """A batch of values, held from now on; and the seqs of records that are not there any more."""
        values: list[Value] = []
        lost, length = [], 0
        records = self._owner.memory.table
        while self._writes and length < BATCH and len(values) < BATCH_VALUES:
            slot, seq = self._writes.popleft()
            self._owner.hold(slot)
            view = records.view(slot)
            if (
                view is None
                or view.seq != seq
                or view.state != table.COMPLETE
                or view.body.parts != 1
                or blocks(view.body.size) > self.staging.size
            ):
                self._owner.let_go(slot)
                lost.append(seq)
                continue
            values.append(Value(slot, seq, view.body))
            length += blocks(view.body.size)
        return values, lost

    def _write(self, log: DiskLog, packer: Packer, values: list[Value], lost: list[int]) -> None:
        written: list[Value] = []
        try:
            written = self._write_all(log, packer, values) if values else []
        except Exception:
            logger.exception("values could not be written to %s", self._path)
        for value in values:
            self._owner.let_go(value.slot)
        done = {value.seq for value in written}
        self._finish(log, written, lost + [value.seq for value in values if value.seq not in done])

    def _gather(self, log: DiskLog, packer: Packer, order: Gather, term: int) -> None:
        """Write a value that lies in parts."""
        written: list[Value] = []
        for tries_left in reversed(range(_GATHER_TRIES)):
            try:
                with gathered(order, self._owner, self.staging, self._hello, term) as value:
                    written = self._write_all(log, packer, [value])
                break
            except _NOT_GATHERED as error:
                if not tries_left:
                    self._complain(f"a value that lies in parts is not written to {self._path}: {error}")
            except Exception:
                logger.exception("a value could not be written to %s", self._path)
                break
        self._finish(log, written, [] if written else [order.seq])

    def _write_all(self, log: DiskLog, packer: Packer, values: list[Value]) -> list[Value]:
        """Those that are on disk now."""
        try:
            return values if self._write_batch(log, packer, values) else []
        except DiskFullError as error:
            if len(values) == 1:
                self._complain(f"the SSD tier is full: {error}")
                return []
        half = len(values) // 2  # some may fit
        return self._write_all(log, packer, values[:half]) + self._write_all(log, packer, values[half:])

    def _write_batch(self, log: DiskLog, packer: Packer, values: list[Value]) -> bool:
        """Whether these values are on disk now.  Raises DiskFullError."""
        length = sum(blocks(value.body.size) for value in values)
        for _ in range(3):
            room = None
            try:
                room = log.reserve(length)
                written = packer.write(room, values)
            except OSError as error:
                if room is not None:
                    log.abandon(room)
                problem = error
            else:
                try:
                    log.commit(room, written)
                    return True
                except OSError as error:
                    problem = error
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT) or not log.evict_for(length):
                self._complain(f"cannot write to {self._path}: {problem}")
                return False
        self._complain(f"{self._path} is full, whatever is evicted")
        return False

    def _finish(self, log: DiskLog, values: list[Value], failed: list[int]) -> None:
        with self._work:
            self._outcome.failed += failed
            self._under_way.difference_update(failed)
            for value in values:
                self._under_way.discard(value.seq)
                if value.seq not in self._cancelled:
                    self._written(value.seq, value.body.key)
            ended = [seq for seq in self._cancelled if seq not in self._under_way]
            for seq in ended:
                log.remove(seq)
                self._cancelled.discard(seq)
                self._outcome.dropped.append(seq)

    def _written(self, seq: int, key: str) -> None:
        self._outcome.written.append(seq)
        self._outcome.keys.append(key)

    def _complain(self, text: str, outcome: str = _LOST_LATER) -> None:
        """In the log, but not for every batch."""
        now = time.monotonic()
        if now > self._complained + 10:
            self._complained = now
            logger.error("%s; %s", text, outcome)

    # -- compaction

    def _compact(self, compactor: Compactor) -> None:
        while not self._stopped.wait(_COMPACTION_PAUSE):
            try:
                while compactor.step():
                    pass
            except OSError as error:
                self._complain(f"room cannot be won back in {self._path}: {error}", "what was there stays")
                self._stopped.wait(10 * _COMPACTION_PAUSE)

    def _pace(self, moved: int) -> bool:
        return not self._stopped.wait(moved / self._settings.compaction)

    # -- reading

    def _promote(self, log: DiskLog, promotion: Promotion, term: int) -> None:
        done = False
        try:
            done = promote(log, self.staging, self._owner, promotion, term)
        except Exception:
            logger.exception("a value could not be promoted from %s", self._path)
        with self._work:
            self._under_way.discard(promotion.seq)
            (self._outcome.promoted if done else self._outcome.unpromoted).append(promotion.seq)

    def stage(self, request: Stage) -> Staged:
        """Read what is asked for into staging memory; values that are not there, or are damaged, get a code."""
        asked = time.monotonic()
        log = self.log
        codes = [int(ErrorCode.OBJECT_NOT_FOUND)] * len(request.seqs)
        if log is None:
            return Staged(0, 0, codes)
        pinned: list[tuple[Record, int]] = []
        for i, seq in enumerate(request.seqs):
            record = log.pin(seq)
            if record is not None:
                pinned.append((record, i))
        try:
            return self._stage(log, pinned, codes, asked)
        finally:
            for record, _ in pinned:
                log.unpin(record)

    def _stage(self, log: DiskLog, pinned: list[tuple[Record, int]], codes: list[int], asked: float) -> Staged:
        if not pinned:
            return Staged(0, 0, codes)
        pinned.sort(key=lambda p: (p[0].file.number, p[0].offset))
        length = sum(blocks(record.size) for record, _ in pinned)
        ticket = self.staging.take(length, STAGE_WAIT)
        if ticket is None:
            busy = ErrorCode.OBJECT_REPLICA_BUSY if length <= self.staging.size else ErrorCode.BUFFER_OVERFLOW
            return Staged(0, 0, [int(busy)] * len(codes))
        try:
            at, index = ticket.offset, iter(pinned)
            for run in runs([record for record, _ in pinned], READ_STEP):
                length = sum(blocks(record.size) for record in run)
                good = log.read(run, self._owner.memory.data[at : at + length])
                for record, right in zip(run, good, strict=True):
                    _, i = next(index)
                    if right:
                        codes[i] = at
                    at += blocks(record.size)
                if not all(good):
                    self._wake()  # the master shall know that they are gone
        except BaseException:
            self.staging.give_back([ticket.number])
            raise
        if not any(good >= 0 for good in codes):
            self.staging.give_back([ticket.number])
            return Staged(0, 0, codes)
        self.staging.lend(ticket, asked)
        return Staged(ticket.number, self._settings.ttl_ms, codes)


def _announced(record: Record) -> DiskRecord:
    return DiskRecord(record.seq, _decode(record.body))
