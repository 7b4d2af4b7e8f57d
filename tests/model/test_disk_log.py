"""The log-structured store against a dict: put, read, remove, evict, damage, a crash at any byte, opening it again.

What a crash or damage may cost is known: values whose write had not ended, or whose bytes were hit.  Nothing may be
read that is not exactly what was put.
"""

import mmap
import os
import random
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake.rpc.record_messages import Body
from mooncake.segment.disk.compaction import SHARE, Compactor
from mooncake.segment.disk.entries import DEAD, WRITTEN, Entry, pack, unpack
from mooncake.segment.disk.files import BLOCK, Files, blocks
from mooncake.segment.disk.log import DiskFullError, DiskLog
from mooncake.segment.disk.records import Written, checksum, runs

QUOTA = 64 * BLOCK
FILE = 8 * BLOCK


class CrashError(Exception):
    pass


class CrashingFiles(Files):
    """Writes that end in the middle, after `left` bytes, as those of a process that is killed."""

    def __init__(self) -> None:
        super().__init__(direct=False)
        self.left = 1 << 60

    def _cut(self, data: bytes) -> bytes:
        cut = data[: self.left]
        self.left -= len(cut)
        return cut

    def write(self, fd, views, offset):
        data = b"".join(views)
        cut = self._cut(data)
        os.pwrite(fd, cut, offset)
        if len(cut) < len(data):
            raise CrashError

    def append(self, fd, data):
        cut = self._cut(data)
        os.write(fd, cut)
        if len(cut) < len(data):
            raise CrashError

    def sync(self, fd):
        self._cut(b"s")
        if not self.left:
            raise CrashError

    def unlink(self, path):
        self._cut(b"u")
        if not self.left:
            raise CrashError
        os.unlink(path)


def pad(value: bytes) -> memoryview:
    return memoryview(value.ljust(blocks(len(value)), b"\0"))


def put(log: DiskLog, values: dict[int, bytes]) -> None:
    room = log.reserve(sum(blocks(len(value)) for value in values.values()))
    at, written = room.offset, []
    try:
        for seq, value in values.items():
            log.fill(room._replace(offset=at), [pad(value)])
            written.append(Written(seq, at, len(value), checksum(memoryview(value)), Body(f"k{seq}", len(value), [])))
            at += blocks(len(value))
    except CrashError:
        log.abandon(room)
        raise
    log.commit(room, written)


def get(log: DiskLog, seqs: list[int]) -> dict[int, bytes]:
    pinned = [record for seq in seqs if (record := log.pin(seq)) is not None]
    pinned.sort(key=lambda record: (record.file.number, record.offset))
    found = {}
    for run in runs(pinned, 4 * BLOCK):
        memory = mmap.mmap(-1, sum(blocks(record.size) for record in run))
        good = log.read(run, memoryview(memory))
        at = 0
        for record, right in zip(run, good, strict=True):
            if right:
                found[record.seq] = memory[at : at + record.size]
            at += blocks(record.size)
    for record in pinned:
        log.unpin(record)
    return found


class LogModel(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = self.folder.name
        self.put_values: dict[int, bytes] = {}  # all that ever were
        self.there: dict[int, bytes] = {}
        self.removed: set[int] = set()
        self.files = CrashingFiles()
        self.seq = 0
        self.quota = QUOTA
        self.flipped: set[tuple[Path, int, int]] = set()
        self.scarred = False  # a crash or damage has left its mark in a file

    @initialize()
    def start(self):
        self._open()

    def _open(self):
        self.files.left = 1 << 60
        self.log = DiskLog(self.path, self.files, FILE, 1 << 62)
        self.log.recover()
        self.log.set_quota(self.quota)
        self._forget_evicted()

    def teardown(self):
        self.log.close()
        self.folder.cleanup()

    def _forget_evicted(self):
        for seq, key in self.log.take_evicted():
            assert key == f"k{seq}"
            self.there.pop(seq, None)

    def _new(self, sizes: list[int]) -> dict[int, bytes]:
        values = {}
        for size in sizes:
            self.seq += 1
            values[self.seq] = bytes([self.seq % 251]) * (size - 1) + b"!"
        self.put_values |= values
        return values

    @rule(sizes=st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=4))
    def put(self, sizes):
        values = self._new(sizes)
        try:
            put(self.log, values)
        except DiskFullError:
            assert sum(map(blocks, sizes)) > self.quota
            return
        self._forget_evicted()
        self.there |= values

    @rule(data=st.data())
    def remove(self, data):
        if self.there:
            seq = data.draw(st.sampled_from(sorted(self.there)))
            assert self.log.remove(seq)
            del self.there[seq]
            self.removed.add(seq)

    @rule(of=st.integers(2, 4))
    def remove_most(self, of):
        for seq in [seq for seq in self.there if seq % of]:
            assert self.log.remove(seq)
            del self.there[seq]
            self.removed.add(seq)

    @rule()
    def reopen(self):
        self.log.close()
        before = dict(self.there)
        self._open()
        assert self.there == before
        assert self.scarred or self.log.counts.torn == 0

    @rule(quota=st.integers(4, 64))
    def another_quota(self, quota):
        self.quota = quota * BLOCK
        self.log.close()
        self._open()

    @rule(sizes=st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=3), data=st.data())
    def crash_in_a_put(self, sizes, data):
        """What was there stays; of what was being put, what comes back is right."""
        values = self._new(sizes)
        self.files.left = data.draw(st.integers(0, sum(map(blocks, sizes)) + 150 * len(sizes)))
        try:
            put(self.log, values)
        except CrashError:
            self.scarred = True
            evicted = [seq for seq, _ in self.log.take_evicted()]  # unless the crash came before their file went
            self.log.close()
            for seq in evicted:
                values[seq] = self.there.pop(seq)
            self._open()
            for seq, value in get(self.log, list(values)).items():
                assert value == values[seq]
                self.there[seq] = value
            return
        except DiskFullError:
            return
        finally:
            self.files.left = 1 << 60
        self._forget_evicted()
        self.there |= values

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def crash_in_a_removal(self, data):
        seq = data.draw(st.sampled_from(sorted(self.there)))
        self.files.left = data.draw(st.integers(0, 47))
        try:
            self.log.remove(seq)
        except CrashError:
            self.scarred = True
            self.log.close()
            self._open()  # it was not acknowledged: it may be there or not
            if not get(self.log, [seq]):
                self.there.pop(seq, None)
            return
        finally:
            self.files.left = 1 << 60
        del self.there[seq]
        self.removed.add(seq)

    @rule()
    def compact(self):
        """Everything stays; then no file has room to gain, but what is being written and what the quota forbids."""
        compactor = Compactor(self.log, self.files, lambda _: True, 2 * BLOCK)
        used = self.log.used
        while compactor.step():
            assert self.log.used <= used
            used = self.log.used
        self._forget_evicted()
        sparse = self.log.find_sparse(SHARE)
        assert sparse is None or self.log.used + sparse.live_bytes > self.quota

    @rule(left=st.integers(0, 40 * BLOCK), fine=st.integers(0, 400))
    def crash_in_compaction(self, left, fine):
        """At any byte that is written, before any sync and any deletion: nothing is lost, and nothing comes back."""
        self.files.left = left + fine
        crashed = False
        try:
            compactor = Compactor(self.log, self.files, lambda _: True, 2 * BLOCK)
            while compactor.step():
                pass
        except CrashError:
            crashed = self.scarred = True
        self.files.left = 1 << 60
        if crashed:
            self.log.close()
            self._open()

    @rule(left=st.integers(1, 12), data=st.data())
    def compaction_is_broken_off(self, left, data):
        """By an error, or the end of the server; values go on being removed, and it is opened again."""

        def pace(_: int) -> bool:
            nonlocal left
            left -= 1
            if self.there and data.draw(st.booleans()):
                seq = data.draw(st.sampled_from(sorted(self.there)))
                assert self.log.remove(seq)
                del self.there[seq]
                self.removed.add(seq)
            return left > 0

        compactor = Compactor(self.log, self.files, pace, 2 * BLOCK)
        while compactor.step():
            pass

    @precondition(lambda self: self.there)
    @rule(kind=st.sampled_from(["data", "index"]), data=st.data())
    def damage(self, kind, data):
        """A flipped bit anywhere: values may be lost, and none is wrong."""
        self.scarred = True
        self.log.close()
        paths = sorted(path for path in Path(self.path).glob(f"*.{kind}") if path.stat().st_size)
        if paths:
            path = data.draw(st.sampled_from(paths))
            raw = bytearray(path.read_bytes())
            at, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
            if (path, at, bit) not in self.flipped:  # twice would be no damage
                self.flipped.add((path, at, bit))
                raw[at] ^= 1 << bit
                path.write_bytes(raw)
        self._open()
        left = get(self.log, list(self.there))
        assert all(self.there[seq] == value for seq, value in left.items())
        assert len(self.there) - len(left) <= 1
        self._forget_evicted()
        self.there = left
        for seq in self.removed & {record.seq for record in self.log.records()}:
            self.log.remove(seq)  # the damage hit the entry of its removal: the master would say so again

    @invariant()
    def is_what_was_put(self):
        if hasattr(self, "log"):
            assert get(self.log, list(self.put_values)) == self.there
            assert {record.seq for record in self.log.records()} == set(self.there)
            assert self.log.used <= max(self.quota, 0) or self.log.used == 0
            on_disk = sum(path.stat().st_size for path in Path(self.path).glob("*.data"))
            assert on_disk <= self.log.used
            assert self.there or not (self.log.used or on_disk), "an empty log takes room"


LogModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLogModel = LogModel.TestCase


def test_index_entries_are_found_again_after_damage():
    entries = [Entry(WRITTEN, seq, seq * BLOCK, 100, seq * 7, b"body" * seq) for seq in range(1, 9)]
    entries.append(Entry(DEAD, 3))
    raw = b"".join(map(pack, entries))
    assert list(unpack(raw)) == entries
    for cut in range(len(raw)):
        found = list(unpack(raw[:cut]))
        whole = [entry for entry in found if entry is not None]
        assert whole == entries[: len(whole)]
        assert len(found) - len(whole) <= 1
    broken = bytearray(raw)
    broken[len(pack(entries[0])) + 20] ^= 1  # in the second entry
    assert [entry for entry in unpack(bytes(broken)) if entry is not None] == entries[:1] + entries[2:]


def test_a_file_stays_readable_while_it_is_deleted(tmp_path):
    log = DiskLog(str(tmp_path), Files(False), FILE, QUOTA)
    put(log, {1: b"x" * 5000})
    record = log.pin(1)
    assert record is not None
    assert log.evict_for(1)
    assert log.take_evicted() == [(1, "k1")]
    assert not list(tmp_path.glob("*.data"))
    memory = mmap.mmap(-1, blocks(5000))
    assert log.read([record], memoryview(memory)) == [True]
    assert memory[:5000] == b"x" * 5000
    before = len(os.listdir("/proc/self/fd"))
    log.unpin(record)
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_without_eviction_a_full_store_refuses(tmp_path):
    log = DiskLog(str(tmp_path), Files(False), FILE, 4 * BLOCK)
    log.may_evict = False
    put(log, {1: b"a" * 3 * BLOCK})
    with pytest.raises(DiskFullError):
        put(log, {2: b"b" * 2 * BLOCK})
    assert set(get(log, [1, 2])) == {1}
    assert log.remove(1)


def test_the_file_read_least_recently_goes_first(tmp_path):
    log = DiskLog(str(tmp_path), Files(False), BLOCK, 3 * BLOCK)
    log.lru = True
    for seq in (1, 2, 3):
        put(log, {seq: bytes([seq]) * BLOCK})
    assert set(get(log, [1])) == {1}
    put(log, {4: b"d" * BLOCK})
    assert set(get(log, [1, 2, 3, 4])) == {1, 3, 4}
    assert log.take_evicted() == [(2, "k2")]


def test_halves_of_files_are_cleared_away(tmp_path):
    (tmp_path / f"{7:016x}.data").write_bytes(b"x" * BLOCK)
    (tmp_path / f"{9:016x}.index").write_bytes(pack(Entry(WRITTEN, 1, 0, 10, 0, b"")))
    (tmp_path / "tier.json").write_text("{}")
    log = DiskLog(str(tmp_path), Files(False), FILE, QUOTA)
    log.recover()
    assert len(log) == 0
    assert os.listdir(tmp_path) == ["tier.json"]


def test_compaction_beside_writers_readers_and_removals(tmp_path):
    """In threads of their own, within a quota that evicts: what is found is right, and the books agree at the end."""
    files = Files(False)
    log = DiskLog(str(tmp_path), files, FILE, QUOTA)
    compactor = Compactor(log, files, lambda _: True, 2 * BLOCK)
    end = time.monotonic() + 2
    problems: list[object] = []
    newest = 0

    def value(seq: int) -> bytes:
        return bytes([seq % 251]) * (1 + seq * 977 % (2 * BLOCK))

    def until_the_end(step) -> None:
        rng = random.Random(step.__name__)
        try:
            while time.monotonic() < end:
                step(rng)
        except BaseException as error:
            problems.append(error)

    def write(_) -> None:
        nonlocal newest
        put(log, {newest + 1: value(newest + 1)})
        newest += 1

    def remove(rng) -> None:
        log.remove(max(1, newest - rng.randrange(60)))
        time.sleep(0)

    def read(rng) -> None:
        for seq, found in get(log, [max(1, newest - rng.randrange(40)) for _ in range(5)]).items():
            assert found == value(seq)

    def compact(_) -> None:
        compactor.step()
        time.sleep(0.001)

    threads = [threading.Thread(target=until_the_end, args=(step,)) for step in (write, remove, read, compact)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert problems == []
    assert log.counts.compacted > 0
    assert log.counts.corrupt == 0
    there = {record.seq for record in log.records()}
    assert set(get(log, list(there))) == there
    log.close()
    again = DiskLog(str(tmp_path), files, FILE, 1 << 40)
    again.recover()
    assert {record.seq for record in again.records()} == there
    assert again.used >= sum(path.stat().st_size for path in tmp_path.glob("*.data"))
    again.close()
