"""The threads that move blocks between the KV cache and the pool, one batch at a time.

Each thread takes all that was queued meanwhile and moves it, group by group and shard by shard, with a vectored call of
the store for each, which holds the interpreter lock neither while it copies nor while it waits.  What became of a job
is always told.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from mooncake.errors import ErrorCode
from mooncake.vllm.blocks import Blocks
from mooncake.vllm.device import Fence
from mooncake.vllm.layout import Layout
from mooncake.vllm.membership import Membership
from mooncake.vllm.stats import Tally

logger = logging.getLogger("vllm.mooncake")

NO_ROOM = int(ErrorCode.NO_AVAILABLE_HANDLE)
NOT_JOINED = int(ErrorCode.UNAVAILABLE_IN_CURRENT_STATUS)
INTERNAL = int(ErrorCode.INTERNAL_ERROR)
_PRESSURE = 1.0  # seconds without saving after the pool had no room
_MOST_BLOCKS = 4096  # of one call
_STOP_LIMIT = 5.0


class Job(NamedTuple):
    """Blocks of any groups to move once `fence` has passed; `done` is told a code a block, in their order, < 0 for what
    was not moved."""

    blocks: list[Blocks]
    fence: Fence
    done: Callable[[list[int]], None]


class Shard(NamedTuple):
    """What this worker holds of a group's blocks under one head of keys: its heads of attention, or some of them.
    `stores`: it also saves them, and no other worker which holds the same does."""

    head: str
    layout: Layout
    stores: bool


class Pool(NamedTuple):
    """What both movers work on.  `shards`: by group."""

    membership: Membership
    shards: list[list[Shard]]
    tally: Tally


class Mover:
    """A thread with a queue of jobs; `operation` is what it does, in the metrics."""

    operation = ""

    def __init__(self, name: str, pool: Pool) -> None:
        self._pool = pool
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        self._queue.put(job)

    def close(self) -> bool:
        """Stop after the batch that is being moved, the rest is not moved; whether that was within the limit."""
        self._stopped = True
        self._queue.put(None)
        self._thread.join(_STOP_LIMIT)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped:
            jobs = self._take()
            if jobs:
                self._move_all(jobs)

    def _take(self) -> list[Job]:
        """Wait for jobs; all that are there, as far as they make one call."""
        jobs, count = [], 0
        job = self._queue.get()
        while job is not None:
            jobs.append(job)
            count += sum(len(blocks.ids) for blocks in job.blocks)
            if count >= _MOST_BLOCKS or self._queue.empty():
                break
            job = self._queue.get()
        return jobs

    def _move_all(self, jobs: list[Job]) -> None:
        everything = [blocks for job in jobs for blocks in job.blocks]
        codes = [[INTERNAL] * len(blocks.ids) for blocks in everything]
        try:
            for job in jobs:
                job.fence.wait()
            for group in sorted({blocks.group for blocks in everything}):
                places = [i for i, blocks in enumerate(everything) if blocks.group == group and blocks.ids]
                moved = iter(self._move_group(group, [everything[i] for i in places]))
                for i in places:
                    codes[i] = list(itertools.islice(moved, len(everything[i].ids)))
        except Exception:
            logger.exception("A batch of %d blocks was not moved", sum(map(len, codes)))
        told = iter(codes)
        for job in jobs:
            job.done(list(itertools.chain.from_iterable(itertools.islice(told, len(job.blocks)))))

    def _move_group(self, group: int, blocks: list[Blocks]) -> list[int]:
        """A code a block: 0, or that of a shard which was not moved."""
        tails = [tail for each in blocks for tail in each.tails()]
        ids = [block for each in blocks for block in each.ids]
        codes = [0] * len(ids)
        if not ids:
            return codes
        for shard in self._pool.shards[group]:
            if self._moves(shard):
                moved = self._move_shard(shard, tails, ids)
                codes = [before or now for before, now in zip(codes, moved, strict=True)]
        return codes

    def _moves(self, shard: Shard) -> bool:
        return True

    def _move_shard(self, shard: Shard, tails: list[str], ids: list[int]) -> list[int]:
        codes: list[int] = []
        began = time.monotonic()
        try:
            store = self._pool.membership.store
            if store is not None:
                codes = self._move(store, shard.layout, [shard.head + tail for tail in tails], ids)
            else:
                codes = [NOT_JOINED] * len(ids)
        except Exception:
            logger.exception("A batch of %d blocks was not moved", len(ids))
        if len(codes) != len(ids):
            codes = [INTERNAL] * len(ids)
        failed = len(codes) - codes.count(0)
        self._pool.tally.add(
            self.operation,
            time.monotonic() - began,
            len(codes),
            size=codes.count(0) * shard.layout.shape.block_bytes,
            status="error" if failed else "ok",
            failed=failed,
        )
        return codes

    def _move(self, store: Any, layout: Layout, keys: list[str], ids: list[int]) -> list[int]:
        raise NotImplementedError


class Loader(Mover):
    """Pool → KV cache."""

    operation = "load_get"

    def _move(self, store: Any, layout: Layout, keys: list[str], ids: list[int]) -> list[int]:
        codes: list[int] = store.get_into_blocks(keys, layout.of(ids))
        return codes


class Saver(Mover):
    """KV cache → pool.  The pool says first which keys it has already: their bytes are not moved."""

    operation = "save_put"
    _pause_until = 0.0

    def _moves(self, shard: Shard) -> bool:
        return shard.stores

    def _move(self, store: Any, layout: Layout, keys: list[str], ids: list[int]) -> list[int]:
        if time.monotonic() < self._pause_until:
            return [NO_ROOM] * len(ids)
        codes: list[int] = store.put_from_blocks(keys, layout.of(ids))
        if NO_ROOM in codes:
            self._pause_until = time.monotonic() + _PRESSURE
        return codes
