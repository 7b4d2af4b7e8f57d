"""The log-structured store: values in large files written from front to end, the oldest of which leave first.

    <id>.data    values one after another, each from the start of a block
    <id>.index   what is where (see `entries`); written after the values, so a value without an entry was never there

Room for a batch is *reserved* at the end of the newest file, filled by the caller's thread without any lock, and
*committed*.  A file whose values are all dead is deleted, and so is the oldest when the quota is reached: values in it
are evicted together, and space comes back without copying.  What is left in a file that is mostly dead is moved
elsewhere (see `compaction`).  A value is known by its sequence number, which no other
value ever has, so an old number finds the old bytes or nothing.

Thread-safe.  A file that is deleted while it is read or written stays open until that is over.
"""

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec

from mooncake.segment.disk.entries import DEAD, WRITTEN, Entry, pack, unpack
from mooncake.segment.disk.files import Files, blocks
from mooncake.segment.disk.records import Counts, LogFile, Record, Room, Written, checksum

logger = logging.getLogger("mooncake.segment")

_encode = msgspec.msgpack.Encoder().encode


class DiskFullError(Exception):
    """There is no room for a batch, and none may be made."""


class DiskLog:
    """The values in `directory`.  `quota`: bytes of data files; `file_limit`: bytes after which a new one is begun;
    `keys_limit`: values."""

    def __init__(self, directory: str, files: Files, file_limit: int, quota: int, keys_limit: int = 1 << 62) -> None:
        self.counts = Counts()
        self.may_evict = True
        self.lru = False
        self._directory = directory
        self._files = files
        self._file_limit = file_limit
        self._quota = quota
        self._keys_limit = keys_limit
        self._lock = threading.Lock()
        self._by_seq: dict[int, Record] = {}
        self._log_files: dict[int, LogFile] = {}  # oldest first
        self._current: LogFile | None = None
        self._survivors: LogFile | None = None  # takes what is moved
        self._wanted = 0  # bytes that moving waits for
        self._stale: dict[int, LogFile] = {}  # moved values → the file whose index lists them still
        self._next = 1
        self._used = 0
        self._evicted: deque[tuple[int, str]] = deque()  # (seq, key), to be told

    # -- views

    @property
    def used(self) -> int:
        """Bytes of all data files."""
        return self._used

    @property
    def quota(self) -> int:
        return self._quota

    def __len__(self) -> int:
        return len(self._by_seq)

    def __contains__(self, seq: int) -> bool:
        return seq in self._by_seq

    def find(self, seq: int) -> Record | None:
        return self._by_seq.get(seq)

    def records(self) -> list[Record]:
        """All that is there now."""
        with self._lock:
            return list(self._by_seq.values())

    def take_evicted(self) -> list[tuple[int, str]]:
        """(seq, key) of values that have left by themselves since the last call."""
        with self._lock:
            taken = list(self._evicted)
            self._evicted.clear()
        return taken

    # -- starting

    def recover(self) -> None:
        """Find again what earlier processes wrote: indexes are read, values are not.  Raises OSError."""
        found: dict[int, set[str]] = {}
        for name in sorted(os.listdir(self._directory)):
            stem, _, kind = name.partition(".")
            if len(stem) == 16 and kind in ("data", "index"):
                with contextlib.suppress(ValueError):
                    found.setdefault(int(stem, 16), set()).add(kind)
        for number, kinds in sorted(found.items()):
            self._next = number + 1
            path = self._path(number)
            if kinds != {"data", "index"}:  # a crash between the making, or the deleting, of the two
                self._files.delete(path)
                continue
            with self._lock:
                self._recover_file(number, path)

    def _recover_file(self, number: int, path: str) -> None:
        data = self._files.open(path + ".data")
        try:
            index = os.open(path + ".index", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            os.close(data)
            raise
        file = LogFile(number, path, data, index)
        file.sealed = True
        size = os.fstat(data).st_size
        with open(path + ".index", "rb") as f:
            raw = f.read()
        for entry in unpack(raw):
            if entry is None or (entry.kind == WRITTEN and entry.offset + blocks(entry.size) > size):
                self.counts.torn += 1
            elif entry.kind == DEAD:
                file.live.pop(entry.seq, None)
            else:
                file.live[entry.seq] = Record(entry.seq, file, entry.offset, entry.size, entry.checksum, entry.body)
        twice = [seq for seq in file.live if seq in self._by_seq]  # a crash while they were moved: one copy is enough
        for seq in twice:
            del file.live[seq]
        if file.live:
            self._files.append(file.index, b"".join(pack(Entry(DEAD, seq)) for seq in twice))
        file.live_bytes = sum(blocks(record.size) for record in file.live.values())
        file.tail = size
        self._used += size
        self._log_files[number] = file
        self._by_seq.update(file.live)
        if not file.live:
            self._delete_file(file)

    def set_quota(self, quota: int) -> None:
        """From now on keep within `quota` bytes."""
        with self._lock:
            self._quota = quota
            while self.may_evict and self.used > quota and self._evict_one():
                pass

    # -- writing

    def reserve(self, length: int) -> Room:
        """Room for `length` bytes (whole blocks); `commit` or `abandon` must follow.  Raises DiskFullError, OSError."""
        with self._lock:
            if length > self._quota:
                raise DiskFullError(f"{length} bytes exceed the quota of {self._quota}")
            file = self._current
            limit = min(self._file_limit, self._quota // 8)  # else eviction would take all at once
            if file is None or (file.tail and file.tail + length > limit):
                if file is not None:
                    self._seal(file)
                file = None
            self._make_room(length)
            if file is None or file.gone:
                file = self._current = self._begin()
            room = Room(file, file.tail, length)
            file.tail += length
            self._used += length
            file.users += 1
            file.writers += 1
            return room

    def fill(self, room: Room, views: Sequence[memoryview]) -> None:
        """Write aligned memory, whole blocks, into reserved room.  Raises OSError."""
        self._files.write(room.file.data, views, room.offset)

    def commit(self, room: Room, written: list[Written]) -> None:
        """These values are in `room` now: find them from now on, also after a restart.  Raises OSError: then they are
        not there."""
        bodies = [_encode(value.body) for value in written]
        entries = [
            Entry(WRITTEN, value.seq, value.offset, value.size, value.checksum, body)
            for value, body in zip(written, bodies, strict=True)
        ]
        with self._lock:
            file = room.file
            try:
                self._files.append(file.index, b"".join(map(pack, entries)))
                for entry in entries:
                    record = Record(entry.seq, file, entry.offset, entry.size, entry.checksum, entry.body)
                    self._by_seq[entry.seq] = record
                    file.add(record)
                    self.counts.written += 1
                    self.counts.written_bytes += entry.size
            finally:
                self._leave(file, writing=True)

    def abandon(self, room: Room) -> None:
        """Nothing came of it; the room stays unused."""
        with self._lock:
            self._leave(room.file, writing=True)

    def evict_for(self, length: int) -> bool:
        """The file system is full, whatever the quota says: evict files of `length` bytes.  False: nothing left."""
        with self._lock:
            before = self.used
            while before - self.used < length:
                if not self.may_evict or not self._evict_one():
                    return before > self.used
            return True

    # -- reading

    def pin(self, seq: int) -> Record | None:
        """The value's record, if it is there; its file stays until `unpin`."""
        with self._lock:
            record = self._by_seq.get(seq)
            if record is not None:
                record.file.users += 1
                if self.lru:  # the file was used: it goes to the end
                    self._log_files[record.file.number] = self._log_files.pop(record.file.number)
            return record

    def unpin(self, record: Record) -> None:
        with self._lock:
            self._leave(record.file, writing=False)

    def read(self, records: list[Record], target: memoryview) -> list[bool]:
        """Read pinned records that lie one after another into `target` (whole blocks, aligned); for each whether its
        bytes are those that were written.  Others are dropped for good."""
        first = records[0]
        try:
            self._files.read(first.file.data, target, first.offset)
        except (OSError, EOFError) as error:
            if len(records) > 1:  # which one is it?
                at, good = 0, []
                for record in records:
                    length = blocks(record.size)
                    good += self.read([record], target[at : at + length])
                    at += length
                return good
            self.drop_damaged(first, error)
            return [False]
        good, at = [], 0
        for record in records:
            right = checksum(target[at : at + record.size]) == record.checksum
            at += blocks(record.size)
            good.append(right)
            if right:
                self.counts.read += 1
                self.counts.read_bytes += record.size
            else:
                self.drop_damaged(record, "its bytes are not those that were written")
        return good

    def drop_damaged(self, record: Record, problem: object) -> None:
        """The value cannot be had any more: it has left by itself."""
        key = record.key
        logger.error("value of key %r in %s.data is dropped: %s", key, record.file.path, problem)
        if self.remove(record.seq):
            self.counts.corrupt += 1
            with self._lock:
                self._evicted.append((record.seq, key))

    # -- removing

    def remove(self, seq: int) -> bool:
        """Never find this value again; whether it was there."""
        with self._lock:
            record = self._by_seq.pop(seq, None)
            if record is None:
                return False
            file = record.file
            file.take(seq)
            if file.live or file.writers:
                self._note_dead(file, seq)
            else:
                self._delete_file(file)
            self._note_moved_dead(seq)
            return True

    # -- moving what is left of a file

    def find_sparse(self, share: float) -> LogFile | None:
        """The file with the least alive, if that is less than `share` of it."""
        with self._lock:
            sparse = [
                file
                for file in self._log_files.values()
                if file.sealed and not file.writers and file.live_bytes < share * file.tail
            ]
            return min(sparse, key=lambda file: file.live_bytes, default=None)

    def claim(self, source: LogFile) -> tuple[list[Record], Room] | None:
        """What is alive in `source`, by offset, and room for it; neither file goes until `unclaim`.  None: there is no
        room within the quota now; the next eviction makes it.  Raises OSError."""
        with self._lock:
            length = self._wanted = source.live_bytes
            if source.gone or source.writers or self._used + length > self._quota:
                return None
            self._wanted = 0
            target = self._survivors
            limit = min(self._file_limit, self._quota // 8)
            if target is None or target is source or target.tail + length > limit:
                target = self._survivors = self._begin(before=source)
                target.sealed = True
            room = Room(target, target.tail, length)
            target.tail += length
            self._used += length
            for file in (source, target):
                file.users += 1
                file.writers += 1
            return sorted(source.live.values(), key=lambda record: record.offset), room

    def move(self, source: LogFile, target: LogFile, moved: list[tuple[Record, int]]) -> None:
        """These records of `source` lie at these offsets of `target` too: find them there from now on.  Raises OSError:
        then they are where they were."""
        self._files.sync(target.data)
        with self._lock:
            alive = [(record, offset) for record, offset in moved if self._by_seq.get(record.seq) is record]
            entries = [Entry(WRITTEN, old.seq, offset, old.size, old.checksum, old.body) for old, offset in alive]
            self._files.append(target.index, b"".join(map(pack, entries)))
            for old, offset in alive:
                record = old._replace(file=target, offset=offset)
                self._note_moved_dead(old.seq)  # where it was before, should that still be there
                self._by_seq[old.seq] = record
                self._stale[old.seq] = source
                source.moved.add(old.seq)
                source.take(old.seq)
                target.add(record)
                self.counts.compacted += 1
                self.counts.compacted_bytes += old.size

    def unclaim(self, source: LogFile, room: Room) -> None:
        """The end of a claim, of which `room` was not used; `source` goes if nothing is left in it.  Raises OSError: it
        stays then."""
        target = room.file
        try:
            self._files.sync(target.index)
        except OSError:
            source.users += 1  # for good: what it has may be needed after a power failure
            source.writers += 1
            raise
        finally:
            with self._lock:
                target.tail -= room.length
                self._used -= room.length
                self._leave(target, writing=True)
                self._leave(source, writing=True)

    def close(self) -> None:
        with self._lock:
            for file in self._log_files.values():
                file.gone = True
                file.close_if_unused()
            self._log_files.clear()
            self._by_seq.clear()

    # -- files; the lock is held

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, f"{number:016x}")

    def _make_room(self, length: int) -> None:
        """Evict until there is room within the quota.  Raises DiskFullError."""
        evicted = False
        while self._used + length > self._quota or len(self._by_seq) >= self._keys_limit:
            if not self.may_evict or not self._evict_one():
                raise DiskFullError(f"the quota of {self._quota} bytes is used")
            evicted = True
        while evicted and self._wanted and self._used + length + self._wanted > self._quota and self._evict_one():
            pass

    def _note_dead(self, file: LogFile, seq: int) -> None:
        try:
            self._files.append(file.index, pack(Entry(DEAD, seq)))
        except OSError as error:
            logger.error("the removal of a value is not noted in %s.index: %s", file.path, error)

    def _note_moved_dead(self, seq: int) -> None:
        """A value that has gone shall not be found again where it was moved from."""
        file = self._stale.pop(seq, None)
        if file is not None:
            file.moved.discard(seq)
            self._note_dead(file, seq)

    def _begin(self, before: LogFile | None = None) -> LogFile:
        """A new file, the last that is evicted; or next before this one."""
        number, self._next = self._next, self._next + 1
        path = self._path(number)
        data = self._files.create(path + ".data")
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            index = os.open(path + ".index", flags, 0o600)
        except OSError:
            os.close(data)
            self._files.delete(path)
            raise
        file = self._log_files[number] = LogFile(number, path, data, index)
        if before is not None:
            others = self._log_files
            at = list(others).index(before.number)
            order = [*islice(others, at), number, *islice(others, at, len(others) - 1)]
            self._log_files = {each: others[each] for each in order}
        return file

    def _seal(self, file: LogFile) -> None:
        file.sealed = True
        self._current = None
        if not file.live and not file.writers:
            self._delete_file(file)

    def _leave(self, file: LogFile, *, writing: bool) -> None:
        file.users -= 1
        file.writers -= writing
        if not file.live and not file.writers and not file.gone:
            self._delete_file(file)
        file.close_if_unused()

    def _evict_one(self) -> bool:
        """Delete the file that should go next; False if none may."""
        for file in self._log_files.values():
            if not file.writers:
                for record in file.live.values():
                    self._evicted.append((record.seq, record.key))
                    del self._by_seq[record.seq]
                    self._note_moved_dead(record.seq)
                    self.counts.evicted += 1
                    self.counts.evicted_bytes += record.size
                file.live, file.live_bytes = {}, 0
                self._delete_file(file)
                return True
        return False

    def _delete_file(self, file: LogFile) -> None:
        if self._log_files.pop(file.number, None) is not None:
            self._used -= file.tail
        if self._current is file:
            self._current = None
        if self._survivors is file:
            self._survivors = None
        for seq in file.moved:
            del self._stale[seq]
        file.moved.clear()
        self._files.delete(file.path)
        file.gone = True
        file.close_if_unused()
