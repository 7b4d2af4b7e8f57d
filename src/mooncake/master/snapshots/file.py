"""One snapshot as bytes: a magic, blocks each with a checksum, and an end that says how many there were.

    8 bytes magic | { u32 length | u32 crc32 of the body | body } ... | u32 2**32 - 1 | u32 crc32 of it | u64 blocks

All little endian.  A file that was cut short, or of which a bit has changed, is known as such.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from zlib import crc32

from mooncake.errors import MooncakeError

MAGIC = b"MCPYSNP1"
_BLOCK = struct.Struct("<II")
_COUNT = struct.Struct("<Q")
_END = 0xFFFFFFFF


class DamagedError(MooncakeError):
    """This is no whole snapshot; the text says why."""


class Writer:
    """Turns blocks' bodies into the file's bytes."""

    def __init__(self) -> None:
        self._blocks = 0

    def block(self, body: bytes) -> bytes:
        start = b"" if self._blocks else MAGIC
        self._blocks += 1
        return start + _BLOCK.pack(len(body), crc32(body)) + body

    def end(self) -> bytes:
        count = _COUNT.pack(self._blocks)
        return _BLOCK.pack(_END, crc32(count)) + count


def bodies(raw: bytes) -> Iterator[memoryview]:
    """The blocks' bodies.  Raises DamagedError when it comes to what is not as it was written."""
    if raw[: len(MAGIC)] != MAGIC:
        raise DamagedError("it does not begin as a snapshot does" if raw else "it is empty")
    view, at, blocks = memoryview(raw), len(MAGIC), 0
    while True:
        if at + _BLOCK.size > len(raw):
            raise DamagedError(f"it is cut short after {len(raw)} bytes")
        length, check = _BLOCK.unpack_from(raw, at)
        at += _BLOCK.size
        ends = length == _END
        body = view[at : at + (_COUNT.size if ends else length)]
        if len(body) != (_COUNT.size if ends else length):
            raise DamagedError(f"it is cut short after {len(raw)} bytes")
        if crc32(body) != check:
            raise DamagedError(f"the checksum of block {blocks} is wrong")
        at += len(body)
        if ends:
            if _COUNT.unpack(body)[0] != blocks or at != len(raw):
                raise DamagedError("blocks are missing or too many")
            return
        blocks += 1
        yield body


def check(raw: bytes) -> None:
    """Raise DamagedError unless `raw` is a whole snapshot."""
    for _ in bodies(raw):
        pass
