"""Whole blocks between aligned memory and files, past the page cache where the file system lets us.

`Files` is all that the tier ever does to a file system's bytes; tests put one in its place that fails at any of them.
Memory and offsets are multiples of BLOCK, views may be many: one system call moves up to IOV_MAX of them, without the
interpreter lock.
"""

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Callable, Sequence

logger = logging.getLogger("mooncake.segment")

BLOCK = 4096
_IOV_MAX = 1024


def blocks(size: int) -> int:
    """Bytes of the whole blocks that hold `size` bytes."""
    return -(-size // BLOCK) * BLOCK


class Files:
    """`direct`: open data files for direct I/O."""

    def __init__(self, direct: bool) -> None:
        self.direct = direct

    def create(self, path: str) -> int:
        """A new data file.  Raises OSError."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._flag, 0o600)

    def open(self, path: str) -> int:
        """A data file that exists.  Raises OSError."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | self._flag)

    @property
    def _flag(self) -> int:
        return os.O_DIRECT if self.direct else 0

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        """All of `views`, one after another.  Raises OSError."""
        for at in range(0, len(views), _IOV_MAX):
            offset = _move(os.pwritev, fd, list(views[at : at + _IOV_MAX]), offset)

    def read(self, fd: int, view: memoryview, offset: int) -> None:
        """Fill `view`.  Raises OSError, EOFError where the file ends before."""
        _move(os.preadv, fd, [view], offset)

    def append(self, fd: int, data: bytes) -> None:
        """`data` at the end of an index file, all of it or nothing.  Raises OSError."""
        end = os.fstat(fd).st_size
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(fd, left) :]
        except OSError:  # entries that nobody believes in must not be found after a restart
            os.ftruncate(fd, end)
            raise

    def sync(self, fd: int) -> None:
        """What was written is there after a power failure too.  Raises OSError."""
        os.fdatasync(fd)

    def delete(self, path: str) -> None:
        """The two files of this stem, the index first: data without an index is nothing."""
        for kind in (".index", ".data"):
            try:
                self.unlink(path + kind)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    logger.error("cannot delete %s%s: %s", path, kind, error)

    def unlink(self, path: str) -> None:
        os.unlink(path)


def _move(call: Callable[[int, list[memoryview], int], int], fd: int, views: list[memoryview], offset: int) -> int:
    while views:
        moved = call(fd, views, offset)
        if not moved:
            raise EOFError(f"the file ends at {offset}")
        offset += moved
        while views and moved >= len(views[0]):
            moved -= len(views.pop(0))
        if moved:
            views[0] = views[0][moved:]
    return offset


def takes_direct(directory: str) -> bool:
    """Whether files there can be written past the page cache.  Raises OSError if none can be written at all."""
    path = os.path.join(directory, f"probe-{os.getpid()}")
    block = mmap.mmap(-1, BLOCK)
    for flag in (os.O_DIRECT, 0):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flag, 0o600)
        except OSError as error:
            if flag and error.errno == errno.EINVAL:
                continue
            raise
        try:
            os.pwritev(fd, [block], 0)
        except OSError as error:
            if flag and error.errno == errno.EINVAL:
                continue
            raise
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)
        return bool(flag)
    return False
