"""The shared memory of one segment: its bytes and its table, as two sealed memfds.

The segment server creates them; clients of the same host map what they are handed over a unix socket.  Sealed
against shrinking, so that no reader can be killed by a truncated mapping.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import socket
import sys

from mooncake.errors import ConfigError
from mooncake.transfer import table
from mooncake.transfer.stream import receive, send

PAGE = mmap.PAGESIZE
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_RESERVE_STEP = 32 << 20
_SPARE = 64 << 20  # bytes left to everybody else

_HUGE = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value


class SegmentMemory:
    """A mapped segment.  `address` is where its first byte lies in this process."""

    base = 0  # where in `data_fd` it begins
    data_fd = table_fd = -1
    address = _mapped = 0
    data = memoryview(b"")

    def __init__(self, data_fd: int, table_fd: int, size: int) -> None:
        self._take_table(data_fd, table_fd, size)
        self.address = _map_aligned(data_fd, _page_up(size))
        self._mapped = _page_up(size)
        self.data = memoryview((ctypes.c_char * size).from_address(self.address)).cast("B")
        self.advise(0, self._mapped, _MADV_HUGEPAGE)

    def _take_table(self, data_fd: int, table_fd: int, size: int) -> None:
        self.size = size
        self.data_fd, self.table_fd = data_fd, table_fd
        self._table = mmap.mmap(table_fd, table.table_size(size))
        self.table = table.Table(memoryview(self._table))

    @classmethod
    def create(cls, segment: int, size: int) -> "SegmentMemory":
        """New, zeroed, with a formatted table.  Raises OSError, and ConfigError for more than the machine can give:
        memory that is promised and not there would end with the kernel killing processes."""
        available = available_memory()
        if size > available:
            raise ConfigError(
                f"a segment of {size >> 20} MiB is asked for, but this host has only {available >> 20} MiB of memory "
                "left; give a smaller global_segment_size"
            )
        data_fd = _sealed(f"mooncake-segment-{segment:x}", _page_up(size))
        memory = cls(data_fd, new_table(segment, size), size)
        memory.table.format(segment, size)
        return memory

    def advise(self, offset: int, length: int, advice: int) -> int:
        """madvise of a range; 0 or an errno.  Does not hold the interpreter lock."""
        if _libc.madvise(self.address + offset, length, advice) == 0:
            return 0
        return ctypes.get_errno()

    def send(self, sock: socket.socket, offset: int, length: int) -> None:
        """These bytes, to a stream.  Raises as `stream.send`."""
        send(sock, self.data[offset : offset + length])  # sendfile goes 64 KiB at a time: slower [measured]

    def receive(self, sock: socket.socket, offset: int, length: int) -> None:
        """These bytes, from a stream.  Raises as `stream.receive`."""
        receive(sock, self.data[offset : offset + length])

    @property
    def is_whole(self) -> bool:
        """Whether all of it is still there; what is sealed always is."""
        return True

    def reserve(self, offset: int) -> int:
        """Make the next step of memory at `offset` resident, in huge pages if the kernel has them to give; the
        offset after it.  Raises OSError when the machine has no memory left."""
        length = self._next_step(offset)
        end = _page_up(offset + length)
        for first in range(offset, end - _HUGE + 1, _HUGE):
            os.posix_fallocate(self.data_fd, first, PAGE)  # a huge page is only made of one that is begun
        self.advise(offset, end - offset, _MADV_COLLAPSE)  # best effort, whatever the system's setting for shmem is
        if self.advise(offset, end - offset, _MADV_POPULATE_WRITE):
            os.posix_fallocate(self.data_fd, offset, end - offset)
        return offset + length

    def _next_step(self, offset: int) -> int:
        length = min(_RESERVE_STEP, self.size - offset)
        if available_memory() < length + _SPARE:
            raise OSError(errno.ENOMEM, "no memory is left")
        return length

    def close(self) -> None:
        """Unmap and close.  The caller sees to it that no copy is under way, and none comes after."""
        if self.data_fd < 0:
            return
        for fd in (self.data_fd, self.table_fd):
            os.close(fd)
        self.data_fd = self.table_fd = -1
        self.data.release()
        if self._mapped:
            _libc.munmap(self.address, self._mapped)
        self.address = 0
        vars(self).pop("table", None)  # not there if it could not be mapped
        vars(self).pop("_table", None)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then modules may be gone, and the kernel takes all back
            self.close()


def available_memory() -> int:
    """Bytes that this process could still use: of the machine, and of its cgroup if that is limited."""
    available = 1 << 62
    with contextlib.suppress(OSError), open("/proc/meminfo") as f:
        for line in f:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) << 10
                break
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as f:
        available = min(available, int(f.read()))
    return available


def _page_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _map_aligned(fd: int, size: int) -> int:
    """Map a file at an address that is a multiple of a huge page: only so can it have huge pages, which large
    copies run a tenth faster with."""
    nothing: int = _libc.mmap(None, size + _HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if nothing == _FAILED:
        raise OSError(ctypes.get_errno(), f"no {size} bytes of address space for a segment")
    address = -(-nothing // _HUGE) * _HUGE
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = _libc.mmap(address, size, rights, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    reason = ctypes.get_errno()
    if address > nothing:
        _libc.munmap(nothing, address - nothing)
    tail = nothing + size + _HUGE - (address + size)
    if tail:
        _libc.munmap(address + size, tail)
    if mapped == _FAILED:
        _libc.munmap(address, size)
        raise OSError(reason, "a segment cannot be mapped")
    return address


def new_table(segment: int, size: int) -> int:
    """A descriptor of memory for the table of a segment of `size` bytes, not formatted yet."""
    return _sealed(f"mooncake-table-{segment:x}", table.table_size(size))


def _sealed(name: str, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd
