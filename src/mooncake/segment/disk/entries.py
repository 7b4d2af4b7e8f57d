"""What an index file says: one entry a value written, one more when it is dead.

Beside every data file `<id>.data` lies `<id>.index`.  An entry is appended when the value's bytes are in the data file,
so what a crash tears has no entry.  Entries of a file that was damaged are skipped, and reading goes on at the next one
that is whole.

    u32 magic | u32 crc of what follows | u8 kind | 3 zero | u32 length of body | u64 seq | u64 offset | u64 size |
    u64 checksum of the value (xxh3) | body (msgpack of messages.Body without extents)
"""

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

WRITTEN, DEAD = 1, 2

_MAGIC = 0x4558564D
_OUTER = struct.Struct("<II")
_INNER = struct.Struct("<B3xIQQQQ")
_HEADER = _OUTER.size + _INNER.size
_MARK = struct.pack("<I", _MAGIC)
_LONGEST_BODY = 1 << 20


class Entry(NamedTuple):
    """One entry.  `offset` is in the data file, `size` the value's own; only `seq` counts in a DEAD one."""

    kind: int
    seq: int
    offset: int = 0
    size: int = 0
    checksum: int = 0
    body: bytes = b""


def pack(entry: Entry) -> bytes:
    inner = _INNER.pack(entry.kind, len(entry.body), entry.seq, entry.offset, entry.size, entry.checksum) + entry.body
    return _OUTER.pack(_MAGIC, zlib.crc32(inner)) + inner


def unpack(raw: bytes) -> Iterator[Entry | None]:
    """The entries in order; None for each run of bytes that is none."""
    at = 0
    while at < len(raw):
        entry = _entry_at(raw, at)
        if entry is None:
            yield None
            at = raw.find(_MARK, at + 1)
            while at >= 0 and _entry_at(raw, at) is None:
                at = raw.find(_MARK, at + 1)
            if at < 0:
                return
            continue
        yield entry
        at += _HEADER + len(entry.body)


def _entry_at(raw: bytes, at: int) -> Entry | None:
    if len(raw) - at < _HEADER:
        return None
    magic, crc = _OUTER.unpack_from(raw, at)
    kind, length, seq, offset, size, checksum = _INNER.unpack_from(raw, at + _OUTER.size)
    end = at + _HEADER + length
    if magic != _MAGIC or length > _LONGEST_BODY or end > len(raw):
        return None
    if zlib.crc32(memoryview(raw)[at + _OUTER.size : end]) != crc or kind not in (WRITTEN, DEAD):
        return None
    return Entry(kind, seq, offset, size, checksum, raw[at + _HEADER : end])
