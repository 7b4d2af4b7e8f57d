"""The threads that move blocks between the KV cache and the pool, one batch at a time.

Each thread takes all that was queued meanwhile and moves it with one vectored call of the store, which holds the
interpreter lock neither while it copies nor while it waits.  What became of a job is always told.
"""

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
    """Blocks to move once `fence` has passed; `done` is told a code a block, < 0 for what was not moved."""

    blocks: list[Blocks]
    fence: Fence
    done: Callable[[list[int]], None]


class Pool(NamedTuple):
    """What both movers work on."""

    membership: Membership
    layout: Layout
    head: str
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
        tails, ids = [], []
        for job in jobs:
            for blocks in job.blocks:
                tails += blocks.tails()
                ids += blocks.ids
        codes: list[int] = []
        began = time.monotonic()
        try:
            for job in jobs:
                job.fence.wait()
            began = time.monotonic()
            store = self._pool.membership.store
            if store is not None:
                head = self._pool.head
                codes = self._move(store, [head + tail for tail in tails], ids)
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
            size=codes.count(0) * self._pool.layout.shape.block_bytes,
            status="error" if failed else "ok",
            failed=failed,
        )
        at = 0
        for job in jobs:
            count = sum(len(blocks.ids) for blocks in job.blocks)
            job.done(codes[at : at + count])
            at += count

    def _move(self, store: Any, keys: list[str], ids: list[int]) -> list[int]:
        raise NotImplementedError


class Loader(Mover):
    """Pool → KV cache."""

    operation = "load_get"

    def _move(self, store: Any, keys: list[str], ids: list[int]) -> list[int]:
        codes: list[int] = store.get_into_blocks(keys, self._pool.layout.of(ids))
        return codes


class Saver(Mover):
    """KV cache → pool.  The pool says first which keys it has already: their bytes are not moved."""

    operation = "save_put"
    _pause_until = 0.0

    def _move(self, store: Any, keys: list[str], ids: list[int]) -> list[int]:
        if time.monotonic() < self._pause_until:
            return [NO_ROOM] * len(ids)
        codes: list[int] = store.put_from_blocks(keys, self._pool.layout.of(ids))
        if NO_ROOM in codes:
            self._pause_until = time.monotonic() + _PRESSURE
        return codes
