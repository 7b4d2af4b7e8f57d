"""Checksums of whole values, taken of bytes as they pass, by a thread of their own, while they are in the cache.

A checksum is the xxh3-64 of a value's bytes in order, with the highest bit set: so 0 can mean that there is none, and
all have the same length in a record.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

NONE = 0
PENDING = (1 << 64) - 1  # in a record that is being written: as long as the one that will take its place
_MARK = 1 << 63
_AT_ONCE = 256 << 10  # bytes that are hashed faster than another thread is woken
_THREADS = 2


class Sums:
    """Of values of `lengths` bytes that come one after another, in pieces of any length."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._hash = xxhash.xxh3_64()
        self._under_way: Future[None] | None = None
        self.restart()

    def restart(self) -> None:
        """The bytes will come once more, from the first one."""
        self.wait()
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

    def add_meanwhile(self, memory: memoryview) -> None:
        """As `add`, while the caller goes on; `memory` must stay as it is until `wait`."""
        self.wait()
        if len(memory) <= _AT_ONCE:
            self.add(memory)
        else:
            self._under_way = _threads().submit(self.add, memory)

    def wait(self) -> None:
        """Until all that was given is in."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()


def checksum(views: Iterable[memoryview]) -> int:
    """That of the views' bytes one after another."""
    hashed = xxhash.xxh3_64()
    for view in views:
        hashed.update(view)
    return _marked(hashed.intdigest())


def _marked(digest: int) -> int:
    found = digest | _MARK
    return found if found != PENDING else PENDING - 1


_pools: dict[int, ThreadPoolExecutor] = {}  # by process: threads do not live on in a forked child


def _threads() -> ThreadPoolExecutor:
    pid = os.getpid()
    known = _pools.get(pid)
    return known or _pools.setdefault(pid, ThreadPoolExecutor(_THREADS, "mooncake-checksum"))
