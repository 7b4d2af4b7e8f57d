"""Checksums of whole values, taken of bytes as they pass, without another way through memory where that can be.

A checksum is the xxh3-64 of a value's bytes in order, with the highest bit set: so 0 can mean that there is none, and
all have the same length in a record.
"""

from collections.abc import Iterable, Sequence

import xxhash

NONE = 0
PENDING = (1 << 64) - 1  # in a record that is being written: as long as the one that will take its place
_MARK = 1 << 63


class Sums:
    """Of values of `lengths` bytes that come one after another, in pieces of any length."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._hash = xxhash.xxh3_64()
        self.restart()

    def restart(self) -> None:
        """The bytes will come once more, from the first one."""
        self._hash.reset()
        self._missing = self._lengths[0]
        self.found: list[int] = []

    def add(self, memory: memoryview) -> None:
        """The next bytes, at most as many as are missing."""
        at, end = 0, len(memory)
        while at < end:
            step = min(self._missing, end - at)
            self._hash.update(memory[at : at + step])
            at += step
            self._missing -= step
            if not self._missing:
                self.found.append(_marked(self._hash.intdigest()))
                self._hash.reset()
                if len(self.found) < len(self._lengths):
                    self._missing = self._lengths[len(self.found)]


def checksum(views: Iterable[memoryview]) -> int:
    """That of the views' bytes one after another."""
    hashed = xxhash.xxh3_64()
    for view in views:
        hashed.update(view)
    return _marked(hashed.intdigest())


def _marked(digest: int) -> int:
    found = digest | _MARK
    return found if found != PENDING else PENDING - 1
