"""Every call ends within its limit; one that does not shows where all threads are, and its process ends.

The time in which a process was stopped, or got no processor, is no call's fault: it is seen by a thread that ticks.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK = 0.05  # seconds


class Watch:
    """Of the calls of one process.  `late` tells of those that ended after their limit."""

    def __init__(self, stacks: str, longest_stop: float) -> None:
        """`stacks`: the file that shows where a call hangs; `longest_stop`: seconds for which others stop this
        process."""
        self.late: list[str] = []
        self._stacks = os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._longest_stop = longest_stop
        self._lost = 0.0  # seconds in which this process did not run
        self._ticking = threading.Thread(target=self._tick, daemon=True)
        self._ticking.start()

    @contextmanager
    def call(self, name: str, limit: float) -> Iterator[None]:
        faulthandler.dump_traceback_later(2 * limit + self._longest_stop, exit=True, file=self._stacks)
        start, lost = time.monotonic(), self._lost
        yield
        took = time.monotonic() - start
        faulthandler.cancel_dump_traceback_later()
        if took > limit:
            time.sleep(2 * TICK)  # the ticking thread may not have seen the end of a stop
            if took - (self._lost - lost) > limit:
                self.late.append(f"{name} took {took:.2f} s; the limit is {limit} s")

    def _tick(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(TICK)
            now = time.monotonic()
            if now - before > 4 * TICK:
                self._lost += now - before - TICK
            before = now
