"""A second thread for copies of many small pieces.

The kernel looks every piece's page up, and two processors do that in half the time.  It helps one copy at a time, and
ends when it has had nothing to do for a while.
"""

import os
import queue
import threading
from collections.abc import Callable

IDLE_LIMIT = 1.0  # seconds


class Job:
    """Something that the helper does now."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self.error: BaseException | None = None
        self.done = threading.Event()

    def finish(self) -> None:
        """Wait for it.  Raises what it raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class Helper:
    """The thread, which is started when it is first needed."""

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._running = False
        self._useful = len(os.sched_getaffinity(0)) > 1

    def begin(self, action: Callable[[], None]) -> Job | None:
        """Do `action` meanwhile; None if the helper is not free.  `finish` must follow."""
        if not self._useful or not self._free.acquire(blocking=False):
            return None
        job = Job(action)
        if not self._running:
            try:
                threading.Thread(target=self._run, name="mooncake-copies", daemon=True).start()
            except RuntimeError:  # no more threads may be had
                self._free.release()
                return None
            self._running = True
        self._queue.put(job)
        return job

    def _run(self) -> None:
        while True:
            try:
                job = self._queue.get(timeout=IDLE_LIMIT)
            except queue.Empty:
                if not self._free.acquire(blocking=False):
                    continue  # somebody is about to ask
                self._running = False
                self._free.release()
                return
            try:
                job.action()
            except BaseException as error:
                job.error = error
            finally:
                self._free.release()
                job.done.set()
