"""A segment in a file that a user names: read and written by system calls, never mapped.

Nobody can seal such a file against being cut short, and a mapping of what is cut off kills its readers.  The range is
locked for as long as any process of the pool has the file open for it, so that no two segments share bytes and no late
writer of a former one writes into a new one.

Behind the bytes lies a mark: whatever cuts any of them off cuts it off as well, and making the file longer again does
not bring it back.  So bytes that were read before the mark was are what was written.
"""

import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct
import time

from mooncake.errors import ConfigError
from mooncake.rpc.serving_messages import FILE_MARK
from mooncake.transfer.memory import SegmentMemory, new_table
from mooncake.transfer.stream import receive, send

LOCK_PATIENCE = 1.0  # seconds: a former segment's clients may take a moment to let go
_STEP = 1 << 20
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

_MAGIC = 0x4B52414D454C4946
_MARK = struct.Struct("<QQ")
_FLOCK = struct.Struct("hhqqi4x")


class FileMemory(SegmentMemory):
    """`size` bytes of `data_fd` from `base` on, and the mark.  `address` is 0, `data` empty: only a table is mapped."""

    def __init__(self, data_fd: int, table_fd: int, size: int, base: int) -> None:
        self._take_table(data_fd, table_fd, size)
        self.base = base
        self._mapped = self.address = 0
        self.data = memoryview(b"")

    @classmethod
    def open(cls, segment: int, path: str, base: int, size: int) -> "FileMemory":
        """Of a new segment, with a formatted table.  Raises ConfigError."""
        fd = open_file(path, base, size + FILE_MARK)
        try:
            _lock(fd, path, base, size + FILE_MARK)
            _try(fd, path, base)
            os.pwrite(fd, _mark(segment), base + size)
            table_fd = new_table(segment, size)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"{path!r} takes no bytes ({error.strerror}); is its file system full?") from None
        except BaseException:
            os.close(fd)
            raise
        memory = cls(fd, table_fd, size, base)
        memory.table.format(segment, size)
        return memory

    @property
    def is_whole(self) -> bool:
        mark = os.pread(self.data_fd, FILE_MARK, self.base + self.size)
        return mark == _mark(self.table.segment)

    def send(self, sock: socket.socket, offset: int, length: int) -> None:
        buffer = memoryview(bytearray(min(length, _STEP)))
        at, end = self.base + offset, self.base + offset + length
        while at < end:
            got = os.preadv(self.data_fd, [buffer[: end - at]], at)
            if not got or not self.is_whole:
                raise OSError(errno.EIO, "the segment's file has been cut short")
            send(sock, buffer[:got])
            at += got

    def receive(self, sock: socket.socket, offset: int, length: int) -> None:
        buffer = memoryview(bytearray(min(length, _STEP)))
        at, end = self.base + offset, self.base + offset + length
        if not self.is_whole:  # writing would make it as long as before, with a hole
            raise OSError(errno.EIO, "the segment's file has been cut short")
        while at < end:
            some = buffer[: end - at]
            receive(sock, some)
            while some:
                written = os.pwritev(self.data_fd, [some], at)
                some = some[written:]
                at += written

    def reserve(self, offset: int) -> int:
        """Have the file's next blocks allocated; the offset after them.  Raises OSError."""
        length = self._next_step(offset)
        # Not posix_fallocate: where a file system cannot do it that writes zeros, beside those who write values.
        if _libc.fallocate(self.data_fd, _KEEP_SIZE, self.base + offset, length):
            reason = ctypes.get_errno()
            if reason not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(reason, os.strerror(reason))
        return offset + length


def _mark(segment: int) -> bytes:
    return _MARK.pack(_MAGIC, segment).ljust(FILE_MARK, b"\xa5")


def open_memory(data_fd: int, table_fd: int, size: int, base: int) -> SegmentMemory:
    """What a server's descriptors stand for: a file from `base` on, or memory if that is negative."""
    return SegmentMemory(data_fd, table_fd, size) if base < 0 else FileMemory(data_fd, table_fd, size, base)


def open_file(path: str, base: int, size: int) -> int:
    """A descriptor of a file that a segment may lie in.  Raises ConfigError that says why not."""
    what = f"a segment of {size} bytes at {base} of {path!r}"
    if not os.path.isabs(path) or "\0" in path:
        raise ConfigError(f"{what}: expected the absolute path of a file, such as /dev/shm/pool")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(f"{what}: that is no regular file; make one of the size that you need (truncate -s)")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{what}: it cannot be opened to read and write ({error.strerror})") from None
    try:
        length = os.fstat(fd).st_size
        if size <= FILE_MARK:
            raise ConfigError(f"{what}: expected more than {FILE_MARK} bytes, which it keeps to itself")
        if length < base + size:
            raise ConfigError(
                f"{what}: the file has {length} bytes; make it larger (truncate -s {base + size} {path}), or name less"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def _try(fd: int, path: str, base: int) -> None:
    """Files of huge pages, for one, cannot be written by system calls.  (Only now that nobody else writes there.)"""
    try:
        os.pwrite(fd, os.pread(fd, 1, base), base)
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read and written by system calls ({error.strerror})") from None


def _lock(fd: int, path: str, base: int, size: int) -> None:
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, base, size, 0)
    give_up = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
            return
        except OSError as error:
            taken = error.errno in (errno.EAGAIN, errno.EACCES)
            if not taken or time.monotonic() >= give_up:
                reason = "another segment, or a process that used one, has it" if taken else error.strerror
                raise ConfigError(
                    f"bytes {base} to {base + size} of {path!r} cannot be locked ({reason}); unmount that one, or name "
                    "another range"
                ) from None
        time.sleep(0.05)
