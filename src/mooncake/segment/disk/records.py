"""What a log of values is made of: files, records of where a value lies in them, room that is given out."""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from mooncake.rpc.record_messages import Body
from mooncake.segment.disk.files import blocks

_decode = msgspec.msgpack.Decoder(Body).decode


class LogFile:
    """One data file with its index.  `tail`: bytes that are given out; `users`: reservations and reads under way;
    `live_bytes`: of blocks with values that are there; `moved`: values that are elsewhere, but its index has still."""

    def __init__(self, number: int, path: str, data: int, index: int) -> None:
        self.number = number
        self.path = path
        self.data, self.index = data, index
        self.tail = 0
        self.users = 0
        self.writers = 0
        self.sealed = False
        self.gone = False
        self.live: dict[int, Record] = {}
        self.live_bytes = 0
        self.moved: set[int] = set()

    def add(self, record: "Record") -> None:
        self.live[record.seq] = record
        self.live_bytes += blocks(record.size)

    def take(self, seq: int) -> None:
        self.live_bytes -= blocks(self.live.pop(seq).size)

    def close_if_unused(self) -> None:
        if self.gone and not self.users and self.data >= 0:
            os.close(self.data)
            os.close(self.index)
            self.data = self.index = -1


class Record(NamedTuple):
    """Where a value lies.  `body` is msgpack of messages.Body without extents."""

    seq: int
    file: LogFile
    offset: int
    size: int
    checksum: int
    body: bytes

    @property
    def key(self) -> str:
        return _decode(self.body).key


class Room(NamedTuple):
    """Reserved: `length` bytes at `offset` of `file`."""

    file: LogFile
    offset: int
    length: int


class Written(NamedTuple):
    """A value that lies in reserved room now."""

    seq: int
    offset: int
    size: int
    checksum: int
    body: Body


class Counts:
    """What happened since the start, values or bytes."""

    def __init__(self) -> None:
        self.written = self.written_bytes = 0
        self.read = self.read_bytes = 0
        self.evicted = self.evicted_bytes = 0
        self.corrupt = 0  # values whose bytes were not what was written, or could not be read
        self.compacted = self.compacted_bytes = 0  # values moved out of files that were mostly dead
        self.torn = 0  # damaged places in index files, and entries of bytes that are not there

    def by_name(self) -> dict[str, int]:
        return dict(vars(self))


def checksum(*views: memoryview) -> int:
    """xxh3 of the views' bytes one after another (`update` releases the interpreter lock, its short form does not)."""
    hashed = xxhash.xxh3_64()
    for view in views:
        hashed.update(view)
    return hashed.intdigest()


def runs(records: Sequence[Record], longest: int) -> Iterator[list[Record]]:
    """Cut records, ordered by file and offset, into lists that lie one after another, of at most `longest` bytes
    (or one value)."""
    run: list[Record] = []
    length = 0
    for record in records:
        if run:
            last = run[-1]
            adjoins = last.file is record.file and last.offset + blocks(last.size) == record.offset
            if not adjoins or length + blocks(record.size) > longest:
                yield run
                run, length = [], 0
        run.append(record)
        length += blocks(record.size)
    if run:
        yield run
