"""Host memory that GPUs may reach by themselves: pinned and known to the driver.

Pinning costs up to 0.6 s a GiB, so large memory is pinned in the background, step by step; what is not pinned yet is
copied by way of a small buffer that is.  No copy crosses two pinned ranges.
"""

import bisect
import ctypes
import logging
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING

from mooncake.transfer.cuda import driver
from mooncake.transfer.pieces import Pieces

if TYPE_CHECKING:
    from mooncake.transfer.cuda.driver import Context

logger = logging.getLogger("mooncake.cuda")

STEP = 256 << 20  # bytes pinned by one call
SMALL = 4 << 20  # bytes: a staging buffer, a millisecond or two
_RESIDENT_LIMIT = 30.0  # seconds to wait for memory that its owner is still making resident
_POLL = 0.05

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


Run = tuple[int, int, bool]
"""Address, length, whether pinned as one."""


class Pins:
    """All of this process.  Thread-safe."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing is pinned: in a forked child."""
        self._lock = threading.Condition()
        self._wanted: dict[int, int] = {}  # address → size
        self._done: dict[int, list[tuple[int, int]]] = {}  # address → its pinned [begin, end)
        self._busy = 0  # address of what is being pinned by the thread
        self._running = False
        self._bases: list[int] = []  # sorted
        self._ends: list[int] = []
        self._left = _limit()

    def want(self, context: "Context", address: int, size: int) -> None:
        """Pin this memory: a little at once, much soon.  It must stay mapped until `release`."""
        if size <= SMALL:
            try:
                self.pin(context, address, size)
            except driver.CudaError as error:
                logger.debug("%d bytes at %#x cannot be pinned: %s", size, address, error)
            return
        with self._lock:
            if address in self._wanted:
                return
            self._wanted[address] = size
            self._done[address] = []
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, args=(context,), name="mooncake-pins", daemon=True).start()

    def pin(self, context: "Context", address: int, size: int) -> None:
        """Pin this memory now.  Raises CudaError."""
        with context.current():
            driver.pin(address, size)
        with self._lock:
            self._wanted[address] = 0
            self._done[address] = [(address, address + size)]
            self._freeze()

    def release(self, address: int) -> None:
        """Unpin what `want` or `pin` named so, before it is unmapped.  No copy of it is under way."""
        with self._lock:
            if self._wanted.pop(address, None) is None:
                return
            self._lock.wait_for(lambda: self._busy != address)
            done = self._done.pop(address)
            self._freeze()
        for begin, _ in done:
            try:
                driver.unpin(begin)
            except driver.CudaError as error:
                logger.debug("%#x: %s", begin, error)

    def split(self, host: Pieces) -> list[Run]:
        """The same memory cut where pinned ranges begin and end, and which of it is pinned."""
        bases, ends = self._bases, self._ends
        runs: list[Run] = []
        for begin, length in zip(host.addresses.tolist(), host.lengths.tolist(), strict=True):
            at, end = begin, begin + length
            while at < end:
                index = bisect.bisect_right(bases, at) - 1
                if index >= 0 and at < ends[index]:
                    stop, is_pinned = ends[index], True
                else:
                    stop, is_pinned = bases[index + 1] if index + 1 < len(bases) else end, False
                stop = min(stop, end)
                runs.append((at, stop - at, is_pinned))
                at = stop
        return runs

    @property
    def pinned(self) -> int:
        """Bytes."""
        return sum(self._ends) - sum(self._bases)

    def _freeze(self) -> None:
        ranges = sorted(run for runs in self._done.values() for run in runs)
        self._bases, self._ends = [begin for begin, _ in ranges], [end for _, end in ranges]

    def _run(self, context: "Context") -> None:
        while True:
            with self._lock:
                self._busy = 0
                self._lock.notify_all()
                step = self._next()
                if step is None:
                    self._running = False
                    return
                address, begin, end = step
                self._busy = address
            try:
                self._wait_until_resident(address, end - 1)
                with context.current():
                    driver.pin(begin, end - begin)
            except driver.CudaError as error:
                logger.warning(
                    "%d MiB of pool memory cannot be pinned, copies between it and GPUs take a detour: %s "
                    "(see ulimit -l and the container's memory limit)",
                    (end - begin) >> 20,
                    error,
                )
                with self._lock:
                    self._left = 0
                continue
            with self._lock:
                self._left -= end - begin
                self._done[address].append((begin, end))
                self._freeze()

    def _wait_until_resident(self, address: int, last: int) -> None:
        """A segment's server makes its memory resident in order, in huge pages; pinning it first would spoil them."""
        page, seen = last & -mmap.PAGESIZE, ctypes.c_ubyte()
        give_up = time.monotonic() + _RESIDENT_LIMIT
        while address in self._wanted and time.monotonic() < give_up:
            if _libc.mincore(page, mmap.PAGESIZE, ctypes.addressof(seen)) or seen.value & 1:
                return
            time.sleep(_POLL)

    def _next(self) -> tuple[int, int, int] | None:
        """(address as wanted, begin, end) of what to pin now."""
        for address, size in self._wanted.items():
            done = self._done[address]
            begin = done[-1][1] if done else address
            end = min(begin + STEP, address + size)
            if begin < end and end - begin <= self._left:
                return address, begin, end
        return None


def _limit() -> int:
    """MC_STORE_PIN_MEMORY_MAX_BYTES: how much pool memory may be pinned; all of it if unset."""
    text = os.environ.get("MC_STORE_PIN_MEMORY_MAX_BYTES", "")
    try:
        return int(text) if text else 1 << 62
    except ValueError:
        logger.warning("MC_STORE_PIN_MEMORY_MAX_BYTES=%r is no whole number of bytes and is not used", text)
        return 1 << 62


pins = Pins()
os.register_at_fork(after_in_child=pins.forget)
