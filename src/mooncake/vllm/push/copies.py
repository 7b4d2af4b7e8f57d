"""The threads that copy blocks to peers.

A peer gets at most all threads but one, so one that hangs does not hold up the others; and it gets nothing while its
lease is over: what is to go there waits for its next Echo.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from mooncake.errors import MooncakeError
from mooncake.transfer.pieces import Int64Array, Pieces
from mooncake.vllm.push.routes import Route
from mooncake.vllm.push.wire import LEASE, Ended, Whole, clock

logger = logging.getLogger("vllm.mooncake")

_CLOSE_LIMIT = 5.0  # seconds
CHUNK = 32 << 20  # bytes of one job: how often lease and cancellation are looked at


class Mover(Protocol):
    """As much of a transfer engine as is needed here."""

    def move_pieces(self, target: str, write: bool, local: Pieces, remote: Pieces) -> None: ...


class Receiver:
    """A worker of decode, as prefill's sees it: one connection of it.  Guarded by the lock of `Copies`."""

    def __init__(self, name: str, session: str, route: Route | None, send: Callable[[Ended | Whole], None]) -> None:
        """`route`: None if it gets nothing from this worker.  `send` is called from any thread."""
        self.name, self.session, self.route, self.send = name, session, route, send
        self.waiting: deque[Job] = deque()
        self.running = 0
        self.stamp = -LEASE  # the newest of our beats that it has echoed

    def may_be_written(self) -> bool:
        return clock() - self.stamp < LEASE


class Copied(NamedTuple):
    """What one job did.  `reason`: "" if all of it is there."""

    seconds: float
    size: int
    pieces: int
    reason: str = ""


class Job(NamedTuple):
    """Blocks `ours` of some layers to the peer's blocks `theirs`.  `wanted` says whether it is not in vain by now; both
    that and `done` are called with the lock held."""

    receiver: Receiver
    layers: Int64Array
    ours: Int64Array
    theirs: Int64Array
    wanted: Callable[[], bool]
    done: Callable[[Copied], None]
    owner: object


class Copies:
    """`lock` guards all receivers, and whatever `done` of a job touches."""

    def __init__(self, mover: Mover, threads: int) -> None:
        self.lock = threading.RLock()
        self._mover = mover
        self._most = max(1, threads - 1)
        self._pool = ThreadPoolExecutor(threads, "mooncake-push")
        self._closed = False
        self._copying = 0  # jobs that are being done

    def add(self, job: Job) -> None:
        """With the lock held."""
        job.receiver.waiting.append(job)
        self.feed(job.receiver)

    def feed(self, receiver: Receiver) -> None:
        """Begin what may begin now.  With the lock held."""
        while receiver.waiting and receiver.running < self._most and receiver.may_be_written() and not self._closed:
            receiver.running += 1
            self._pool.submit(self._run, receiver.waiting.popleft())

    def drop(self, receiver: Receiver, owner: object) -> int:
        """Forget the jobs of `owner` that have not begun; how many.  With the lock held."""
        left = deque(job for job in receiver.waiting if job.owner is not owner)
        dropped = len(receiver.waiting) - len(left)
        receiver.waiting = left
        return dropped

    def close(self) -> bool:
        """Begin no copy any more; whether none is under way, after a few seconds."""
        with self.lock:
            self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        give_up = time.monotonic() + _CLOSE_LIMIT
        while self._copying and time.monotonic() < give_up:
            time.sleep(0.005)
        return not self._copying

    def _run(self, job: Job) -> None:
        with self.lock:
            begins = self._may_begin(job)
            self._copying += begins
        if not begins:
            return
        copied = self._copy(job)
        with self.lock:
            self._copying -= 1
            job.receiver.running -= 1
            job.done(copied)
            self.feed(job.receiver)

    def _may_begin(self, job: Job) -> bool:
        """It has waited for a thread: whether it still may be done."""
        if self._closed:
            return False
        if not job.wanted():
            job.receiver.running -= 1
            job.done(Copied(0.0, 0, 0, "it is not wanted any more"))
            self.feed(job.receiver)
            return False
        if not job.receiver.may_be_written():
            job.receiver.running -= 1
            job.receiver.waiting.appendleft(job)
            return False
        return True

    def _copy(self, job: Job) -> Copied:
        receiver = job.receiver
        began = time.monotonic()
        try:
            assert receiver.route is not None
            local, remote = receiver.route.pieces(job.layers, job.ours, job.theirs)
            self._mover.move_pieces(receiver.session, True, local, remote)
            return Copied(time.monotonic() - began, local.total, len(local.lengths))
        except MooncakeError as error:
            logger.warning("Blocks were not pushed to %s: %s", receiver.session, error)
            return Copied(0.0, 0, 0, f"prefill could not push: {error}")
        except Exception as error:
            logger.exception("Blocks were not pushed to %s", receiver.session)
            return Copied(0.0, 0, 0, f"prefill failed to push: {error!r}")
