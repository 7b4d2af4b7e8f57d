"""From a segment's memory into reserved room on disk: straight where bytes lie on whole blocks, else through a buffer.

A value's checksum is taken from the very memory that is written.  Nothing here touches bytes one by one: views go to
system calls, copies to memmove, both without the interpreter lock.
"""

import ctypes
import mmap
from typing import NamedTuple

import msgspec

from mooncake.rpc.record_messages import Body
from mooncake.segment.disk.files import BLOCK, blocks
from mooncake.segment.disk.log import DiskLog
from mooncake.segment.disk.records import Room, Written, checksum
from mooncake.transfer.memory import SegmentMemory

BUFFER = 8 << 20


class Value(NamedTuple):
    """A whole value in memory: its record's first slot, and what the record says."""

    slot: int
    seq: int
    body: Body


class Packer:
    """Fills room in `log` from `memory`; for one thread.

    Views of what comes next are collected, and written when the buffer is full or all is there.  A view that is not of
    whole blocks is always the last one, in the buffer, and goes on with what is added next.
    """

    def __init__(self, memory: SegmentMemory, log: DiskLog) -> None:
        self._memory = memory
        self._log = log
        self._buffer = mmap.mmap(-1, BUFFER)
        self._bytes = memoryview(self._buffer)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._used = 0
        self._views: list[memoryview] = []
        self._room: Room | None = None
        self._at = 0  # where in the file the views go

    def write(self, room: Room, values: list[Value]) -> list[Written]:
        """Fill `room` with `values`, each from the start of a block.  Raises OSError."""
        written = []
        self._room, self._at, self._used, self._views = room, room.offset, 0, []
        begins = room.offset
        for value in values:
            body = value.body
            ranges = list(zip(body.extents[::2], body.extents[1::2], strict=True))
            sources = [self._memory.data[offset : offset + length] for offset, length in ranges]
            written.append(
                Written(value.seq, begins, body.size, checksum(*sources), msgspec.structs.replace(body, extents=[]))
            )
            begins += blocks(body.size)
            if _is_aligned(ranges):
                offset, length = ranges[-1]
                whole = length // BLOCK * BLOCK
                self._views += sources[:-1]
                if whole:
                    self._views.append(sources[-1][:whole])
                ranges = [(offset + whole, length - whole)]
            for offset, length in ranges:
                self._copy(offset, length)
            self._pad()
        self._flush()
        return written

    def _copy(self, offset: int, length: int) -> None:
        """Bytes of the segment come next, through the buffer."""
        while length:
            if self._used == BUFFER:
                self._flush()
            step = min(length, BUFFER - self._used)
            ctypes.memmove(self._address + self._used, self._memory.address + offset, step)
            self._add(step)
            offset += step
            length -= step

    def _pad(self) -> None:
        """Zeroes up to the end of the block."""
        rest = -self._used % BLOCK
        if rest:
            ctypes.memset(self._address + self._used, 0, rest)
            self._add(rest)

    def _add(self, length: int) -> None:
        """The buffer's next `length` bytes come next."""
        begin = self._used
        if begin % BLOCK:
            begin -= len(self._views.pop())
        self._used += length
        self._views.append(self._bytes[begin : self._used])

    def _flush(self) -> None:
        assert self._room is not None
        length = sum(map(len, self._views))
        self._log.fill(self._room._replace(offset=self._at, length=length), self._views)
        self._at += length
        self._used, self._views = 0, []


def _is_aligned(ranges: list[tuple[int, int]]) -> bool:
    return not any(offset % BLOCK for offset, _ in ranges) and not any(length % BLOCK for _, length in ranges[:-1])
