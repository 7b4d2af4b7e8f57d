"""Blocks that are being saved, and hashes of which it is known that the pool has them."""

import time
from typing import Any

from mooncake.vllm.blocks import Blocks
from mooncake.vllm.plan import Saved

KNOWN_FOR = 60.0  # seconds until a block is offered to the pool again, which may have lost it
_MOST_KNOWN = 500_000  # of one group


class Known:
    """Hashes of each group's blocks that were in the pool within the last minute."""

    def __init__(self, groups: int) -> None:
        self._until: list[dict[bytes, float]] = [{} for _ in range(groups)]

    def contains(self, group: int, value: bytes) -> bool:
        return self._until[group].get(value, 0.0) > time.monotonic()

    def unknown(self, group: int, hashes: list[bytes], ids: list[int], busy: set[bytes]) -> list[tuple[bytes, int]]:
        """The (hash, id) of those that are neither known nor `busy`; null blocks, of id 0, hold nothing."""
        now, until = time.monotonic(), self._until[group].get
        return [
            (value, block)
            for value, block in zip(hashes, ids, strict=True)
            if block and until(value, 0.0) <= now and value not in busy
        ]

    def add(self, group: int, hashes: list[bytes]) -> None:
        known = self._until[group]
        known |= dict.fromkeys(hashes, time.monotonic() + KNOWN_FOR)
        if len(known) > _MOST_KNOWN:
            known.clear()

    def forget(self, hashes: list[bytes]) -> None:
        """The pool lacks these, or some of them: they are offered again."""
        for known in self._until:
            if known:
                for value in hashes:
                    known.pop(value, None)

    def clear(self) -> None:
        for known in self._until:
            known.clear()


class Pins:
    """References on blocks that are being saved, so that nobody overwrites them; at most `most` at a time."""

    def __init__(self, most: int, workers: int, groups: int) -> None:
        self.pool: Any = None  # vLLM's BlockPool, once it is known
        self.hashes: list[set[bytes]] = [set() for _ in range(groups)]  # what is being saved of each group
        self.most = most
        self._workers = workers
        self._jobs: dict[int, tuple[list[Blocks], list[int]]] = {}  # what it saves, [workers left]
        self._failed: dict[int, set[int]] = {}
        self._last = 0
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return self.most - self._count if self.pool is not None else 0

    def add(self, blocks: Blocks) -> None:
        """Pin these."""
        self.pool.touch([self.pool.blocks[block] for block in blocks.ids])
        self.hashes[blocks.group].update(blocks.hashes)
        self._count += len(blocks.ids)

    def begin(self, saves: list[Blocks]) -> int:
        """A number for the job that saves these, which were all added."""
        self._last += 1
        self._jobs[self._last] = saves, [self._workers]
        return self._last

    def end(self, job: int, outcome: Saved) -> list[tuple[int, list[bytes]]]:
        """Some workers are through with a job.  When all are its blocks are let go; by group what is saved now."""
        entry = self._jobs.get(job)
        if entry is None:
            return []
        saves, left = entry
        failed = self._failed.setdefault(job, set())
        failed |= outcome.failed
        left[0] -= outcome.ranks
        if left[0] > 0:
            return []
        del self._jobs[job], self._failed[job]
        done, at = [], 0
        for blocks in saves:
            self.hashes[blocks.group].difference_update(blocks.hashes)
            self._count -= len(blocks.ids)
            saved = [value for i, value in enumerate(blocks.hashes, at) if i not in failed] if failed else blocks.hashes
            done.append((blocks.group, saved))
            at += len(blocks.hashes)
        for blocks in reversed(saves):
            # A prefix's end leaves first.
            self.pool.free_blocks([self.pool.blocks[block] for block in reversed(blocks.ids)])
        return done
