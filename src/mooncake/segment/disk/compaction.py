"""Room comes back from files that are mostly dead: what is alive in them moves to a file of its own, one after another.

    read and write ──► data synced ──► entries in the new index ──► synced ──► old file deleted

At any moment a value has an entry whose bytes are whole; for a while two, of which a restart forgets one.  A value that
is removed in that while is noted in both indexes.  Only values under SHARE of a file are ever copied, so each byte of
room costs at most as many bytes of copying; the pace is bounded, since readers and writers want the disk as well."""

import mmap
from collections.abc import Callable

from mooncake.segment.disk.files import Files, blocks
from mooncake.segment.disk.log import DiskLog
from mooncake.segment.disk.records import Record, Room, runs

SHARE = 0.5  # of a file that is alive: below, it is moved
BUFFER = 4 << 20


class Compactor:
    """Compacts `log`; for one thread.  `pace`, told how many bytes were just moved, takes the time that they may take,
    and says whether to go on."""

    def __init__(self, log: DiskLog, files: Files, pace: Callable[[int], bool], buffer: int = BUFFER) -> None:
        self._log = log
        self._files = files
        self._pace = pace
        self._buffer = memoryview(mmap.mmap(-1, buffer))

    def step(self) -> bool:
        """Compact one file; False if there is none that should be, or no room for what is alive in it.  Raises
        OSError: all values are where they were, or where they were moved to."""
        source = self._log.find_sparse(SHARE)
        claim = None if source is None else self._log.claim(source)
        if source is None or claim is None:
            return False
        records, room = claim
        used, go_on = 0, True
        try:
            for run in runs(records, len(self._buffer)):
                length = sum(blocks(record.size) for record in run)
                moved = self._copy(run, Room(room.file, room.offset + used, length))
                used += length
                self._log.move(source, room.file, moved)
                go_on = self._pace(length)
                if not go_on:
                    break
        finally:
            self._log.unclaim(source, room._replace(offset=room.offset + used, length=room.length - used))
        return go_on

    def _copy(self, run: list[Record], room: Room) -> list[tuple[Record, int]]:
        """Write what lies one after another into `room`; those that could be read, and where each lies now.  (Checksums
        go with them, and are compared when somebody reads them.)"""
        first = run[0]
        step = len(self._buffer)
        for at in range(0, room.length, step):
            view = self._buffer[: min(step, room.length - at)]
            try:
                self._files.read(first.file.data, view, first.offset + at)
            except (OSError, EOFError) as error:
                return self._copy_each(run, room, error)
            self._log.fill(Room(room.file, room.offset + at, len(view)), [view])
        moved, at = [], room.offset
        for record in run:
            moved.append((record, at))
            at += blocks(record.size)
        return moved

    def _copy_each(self, run: list[Record], room: Room, error: Exception) -> list[tuple[Record, int]]:
        """Not all of the run can be read: find out which."""
        if len(run) == 1:
            self._log.drop_damaged(run[0], error)
            return []
        moved, at = [], room.offset
        for record in run:
            length = blocks(record.size)
            moved += self._copy([record], Room(room.file, at, length))
            at += length
        return moved
