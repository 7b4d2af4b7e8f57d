"""The shared memory of one segment: its bytes and its table, as two sealed memfds.

The segment server creates them; clients of the same host map what they are handed over a unix socket.  Sealed
against shrinking, so that no reader can be killed by a truncated mapping.
"""

import ctypes
import fcntl
import mmap
import os

from mooncake.transfer import table

PAGE = mmap.PAGESIZE
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_POPULATE_STEP = 32 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class SegmentMemory:
    """A mapped segment.  `address` is where its first byte lies in this process."""

    def __init__(self, data_fd: int, table_fd: int, size: int) -> None:
        self.size = size
        self.data_fd, self.table_fd = data_fd, table_fd
        self._data = mmap.mmap(data_fd, -(-size // PAGE) * PAGE)
        self._table = mmap.mmap(table_fd, table.table_size(size))
        self.data = memoryview(self._data)
        self.table = table.Table(memoryview(self._table))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._data))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.advise(0, size, _MADV_HUGEPAGE)

    @classmethod
    def create(cls, segment: int, size: int) -> "SegmentMemory":
        """New, zeroed, with a formatted table.  Raises OSError."""
        data_fd = _sealed(f"mooncake-segment-{segment:x}", -(-size // PAGE) * PAGE)
        table_fd = _sealed(f"mooncake-table-{segment:x}", table.table_size(size))
        memory = cls(data_fd, table_fd, size)
        memory.table.format(segment, size)
        return memory

    def advise(self, offset: int, length: int, advice: int) -> int:
        """madvise of a range; 0 or an errno.  Does not hold the interpreter lock."""
        if _libc.madvise(self.address + offset, length, advice) == 0:
            return 0
        return ctypes.get_errno()

    def reserve(self, offset: int) -> int:
        """Make the next step of memory at `offset` resident; the offset after it.  Raises OSError when the
        machine has no memory left."""
        length = min(_POPULATE_STEP, self.size - offset)
        end = -(-(offset + length) // PAGE) * PAGE
        if self.advise(offset, end - offset, _MADV_POPULATE_WRITE):
            os.posix_fallocate(self.data_fd, offset, end - offset)
        return offset + length

    def close(self) -> None:
        """Unmap and close.  The caller sees to it that no copy is under way."""
        for fd in (self.data_fd, self.table_fd):
            os.close(fd)
        self.data_fd = self.table_fd = -1
        self.data.release()
        # Objects made by from_buffer may still be alive for a moment; the mapping goes with the last of them.
        del self._data, self._table, self.table


def _sealed(name: str, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd
