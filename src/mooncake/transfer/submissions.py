"""Transfers that go on in the background: submitted, then polled or waited for."""

import queue
import threading
from collections.abc import Callable, Sequence
from itertools import count

THREADS = 4
DONE, RUNNING, FAILED, TIMED_OUT = 1, 0, -1, -2


class _Batch:
    def __init__(self, action: Callable[[], int]) -> None:
        self.action = action
        self.code = 0
        self.finished = threading.Event()


class Submissions:
    """Batches by number; a number is forgotten once its end has been told.  Threads start with the first batch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._batches: dict[int, _Batch] = {}
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._threads = self._waiting = 0

    def submit(self, action: Callable[[], int]) -> int:
        """The number of a new batch, which runs `action` (0, FAILED or TIMED_OUT)."""
        batch = _Batch(action)
        with self._lock:
            number = next(self._numbers)
            self._batches[number] = batch
            self._waiting += 1
            more = self._threads < min(THREADS, self._waiting)
            self._threads += more
        self._queue.put(batch)
        if more:
            threading.Thread(target=self._run, name="mooncake-engine-batches", daemon=True).start()
        return number

    def status(self, number: int) -> int:
        """DONE, RUNNING, TIMED_OUT or FAILED (also for a number that is not known)."""
        with self._lock:
            batch = self._batches.get(number)
            if batch is None:
                return FAILED
            if not batch.finished.is_set():
                return RUNNING
            del self._batches[number]
        return batch.code or DONE

    def wait(self, numbers: Sequence[int]) -> int:
        """Until all have ended; 0 if all succeeded."""
        with self._lock:
            batches = [self._batches.pop(number, None) for number in numbers]
        codes = []
        for batch in batches:
            if batch is not None:
                batch.finished.wait()
            codes.append(FAILED if batch is None else batch.code)
        return FAILED if any(codes) else 0

    def close(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, THREADS
        for _ in range(threads):
            self._queue.put(None)

    def _run(self) -> None:
        while True:
            batch = self._queue.get()
            if batch is None:
                return
            try:
                batch.code = batch.action()
            except BaseException:
                batch.code = FAILED
                raise
            finally:
                batch.finished.set()
                with self._lock:
                    self._waiting -= 1
