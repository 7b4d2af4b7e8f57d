"""The memory that the engine has registered: what of it is known to be mapped, so that fast copies may touch it.

Device memory is registered like host memory, but never known to be mapped: each copy asks the driver for it (see
transfer.room).
"""

import bisect
import threading

import numpy as np
import numpy.typing as npt

from mooncake.transfer.cuda import driver
from mooncake.transfer.pieces import Int64Array, Pieces

_DEVICE, _READABLE, _WRITABLE = 0, 1, 2  # what the processor may do with it


class RegisteredMemory:
    """Non-overlapping ranges of this process's memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: list[int] = []
        self._ends: list[int] = []
        self._rights: list[int] = []
        self._arrays = self._freeze()

    def add(self, base: int, size: int) -> str:
        """Register; "" or the reason why not."""
        if base <= 0 or size <= 0:
            return f"address {base:#x} with {size} bytes is no memory"
        rights = _rights_of(base, size)
        if rights is None:
            return f"{size} bytes at {base:#x} are neither readable host memory nor device memory of this process"
        with self._lock:
            at = bisect.bisect_right(self._bases, base)
            if (at and self._ends[at - 1] > base) or (at < len(self._bases) and self._bases[at] < base + size):
                return f"{size} bytes at {base:#x} overlap memory that is registered already"
            self._bases.insert(at, base)
            self._ends.insert(at, base + size)
            self._rights.insert(at, rights)
            self._arrays = self._freeze()
        return ""

    def remove(self, base: int) -> bool:
        with self._lock:
            at = bisect.bisect_left(self._bases, base)
            if at == len(self._bases) or self._bases[at] != base:
                return False
            for column in (self._bases, self._ends, self._rights):
                del column[at]
            self._arrays = self._freeze()
        return True

    def clear(self) -> None:
        with self._lock:
            self._bases, self._ends, self._rights = [], [], []
            self._arrays = self._freeze()

    def covers(self, pieces: Pieces, write: bool) -> bool:
        """Whether every piece lies inside one registered range of mapped host memory (a writable one to `write`)."""
        return self._cover(pieces, _WRITABLE if write else _READABLE)

    def contains(self, pieces: Pieces) -> bool:
        """Whether every piece lies inside one registered range."""
        return self._cover(pieces, _DEVICE)

    def _cover(self, pieces: Pieces, least: int) -> bool:
        bases, ends, rights = self._arrays
        if not len(bases):
            return False
        addresses, lengths = pieces.hull()
        index = np.searchsorted(bases, addresses, side="right") - 1
        return bool(
            (index >= 0).all() and (addresses + lengths <= ends[index]).all() and (rights[index] >= least).all()
        )

    def covers_one(self, address: int, size: int, write: bool) -> bool:
        """As `covers`, of one piece."""
        with self._lock:
            at = bisect.bisect_right(self._bases, address) - 1
            least = _WRITABLE if write else _READABLE
            return at >= 0 and address + size <= self._ends[at] and self._rights[at] >= least

    def _freeze(self) -> tuple[Int64Array, Int64Array, npt.NDArray[np.int8]]:
        return np.array(self._bases, np.int64), np.array(self._ends, np.int64), np.array(self._rights, np.int8)


def _rights_of(base: int, size: int) -> int | None:
    if driver.is_loaded() and (allocation := driver.range_of(base)) is not None:
        return _DEVICE if driver.run_of(allocation, base + size).end >= base + size else None
    mapped, writable = _mapping(base, size)
    if not mapped:
        return None
    return _WRITABLE if writable else _READABLE


def _mapping(base: int, size: int) -> tuple[bool, bool]:
    """(wholly mapped and readable, also writable) of a range, by /proc/self/maps."""
    at, end, writable = base, base + size, True
    with open("/proc/self/maps") as f:
        for line in f:
            low_high, rights = line.split(maxsplit=2)[:2]
            low, _, high = low_high.partition("-")
            if int(high, 16) <= at:
                continue
            if int(low, 16) > at or rights[0] != "r":
                return False, False
            writable = writable and rights[1] == "w"
            at = int(high, 16)
            if at >= end:
                return True, writable
    return False, False
