"""Buffers that the engine lends out: registered memory in classes of 8 KiB to 256 MiB, cut from one pool of 2 GiB.

The pool is address space until it is used.  A block is halved until it fits, and joined with its other half when both
are free.  What does not fit gets memory of its own.
"""

import ctypes
import mmap
import threading

SMALLEST, LARGEST = 8 << 10, 256 << 20  # bytes
POOL = 2 << 30
_MAP_NORESERVE = 0x4000


class Block:
    """Anonymous memory."""

    def __init__(self, size: int) -> None:
        """Raises OSError."""
        self.size = size
        self._mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))


class ManagedPool:
    """One pool; addresses are absolute.  Thread-safe."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.block = Block(POOL)
        self._lock = threading.Lock()
        self._free: dict[int, set[int]] = {size: set() for size in _classes()}  # class → offsets
        self._free[LARGEST].update(range(0, POOL, LARGEST))
        self._used: dict[int, int] = {}  # offset → class

    def allocate(self, length: int) -> int:
        """Address of a block of `length` bytes or more, 0 if none is free.  `length` is at most LARGEST."""
        wanted = _class_of(length)
        with self._lock:
            size = wanted
            while size <= LARGEST and not self._free[size]:
                size *= 2
            if size > LARGEST:
                return 0
            offset = self._free[size].pop()
            while size > wanted:
                size //= 2
                self._free[size].add(offset + size)
            self._used[offset] = wanted
        return self.block.address + offset

    def free(self, address: int) -> bool:
        """Whether `address` was lent out."""
        offset = address - self.block.address
        with self._lock:
            size = self._used.pop(offset, 0)
            if not size:
                return False
            while size < LARGEST and offset ^ size in self._free[size]:
                self._free[size].remove(offset ^ size)
                offset &= ~size
                size *= 2
            self._free[size].add(offset)
        return True


def _classes() -> list[int]:
    return [SMALLEST << i for i in range((LARGEST // SMALLEST).bit_length())]


def _class_of(length: int) -> int:
    return max(SMALLEST, 1 << (length - 1).bit_length())
