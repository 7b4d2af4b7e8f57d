"""Blocks that are being saved, and hashes of which it is known that the pool has them."""

import time
from typing import Any

from mooncake.vllm.blocks import Blocks
from mooncake.vllm.plan import Saved

KNOWN_FOR = 60.0  # seconds until a block is offered to the pool again, which may have lost it
_MOST_KNOWN = 500_000


class Known:
    """Hashes that were in the pool within the last minute."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}

    def __contains__(self, value: bytes) -> bool:
        until = self._until.get(value)
        return until is not None and time.monotonic() < until

    def add(self, hashes: list[bytes]) -> None:
        until = time.monotonic() + KNOWN_FOR
        for value in hashes:
            self._until[value] = until
        if len(self._until) > _MOST_KNOWN:
            self._until.clear()

    def clear(self) -> None:
        self._until.clear()


class Pins:
    """References on blocks that are being saved, so that nobody overwrites them; at most `most` at a time."""

    def __init__(self, most: int, workers: int) -> None:
        self.pool: Any = None  # vLLM's BlockPool, once it is known
        self._most = most
        self._workers = workers
        self._hashes: set[bytes] = set()
        self._ids: list[int] = []  # of the job that is being made
        self._jobs: dict[int, tuple[list[bytes], list[int], list[int]]] = {}  # hashes, ids, [workers left]
        self._failed: dict[int, set[int]] = {}
        self._last = 0
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return self._most - self._count if self.pool is not None else 0

    def wanted(self, value: bytes) -> bool:
        """Whether nobody is saving this already."""
        return value not in self._hashes

    def add(self, hashes: list[bytes], ids: list[int]) -> None:
        """Pin these."""
        self.pool.touch([self.pool.blocks[block] for block in ids])
        self._hashes.update(hashes)
        self._count += len(ids)

    def begin(self, saves: list[Blocks]) -> int:
        """A number for the job that saves these, which were all added."""
        self._last += 1
        hashes = [value for blocks in saves for value in blocks.hashes]
        self._jobs[self._last] = hashes, [block for blocks in saves for block in blocks.ids], [self._workers]
        return self._last

    def end(self, job: int, saved: Saved) -> list[bytes]:
        """Some workers are through with a job.  When all are its blocks are let go; the hashes that are saved now."""
        entry = self._jobs.get(job)
        if entry is None:
            return []
        hashes, ids, left = entry
        failed = self._failed.setdefault(job, set())
        failed |= saved.failed
        left[0] -= saved.ranks
        if left[0] > 0:
            return []
        del self._jobs[job], self._failed[job]
        self._hashes.difference_update(hashes)
        self._count -= len(ids)
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(ids)])  # a prefix's end leaves first
        return [value for i, value in enumerate(hashes) if i not in failed]
