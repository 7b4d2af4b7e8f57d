"""Memory of our own that values gather in: before they cross into the pool, or before parts of them are believed."""

import mmap
import os
import sys

import numpy as np

from mooncake.transfer.room import Room


class Scratch:
    """`size` bytes at `address`; freed with the last reference.  Raises OSError, ValueError, OverflowError."""

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("mooncake-session", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, size)
            self._mapping = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        self.address = int(np.frombuffer(self._mapping, np.uint8).ctypes.data)
        self.room = Room(self.address, self._fd, size)

    def __del__(self) -> None:
        if hasattr(self, "room") and not sys.is_finalizing():
            self.room.close()
            os.close(self._fd)
