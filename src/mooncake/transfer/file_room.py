"""A range of a file that pieces are copied to and from by the kernel; the counterpart of `room.Room` for what must not
be mapped.  Device memory passes through a staging buffer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mooncake.errors import TransferError
from mooncake.transfer.cuda import driver
from mooncake.transfer.memory import SegmentMemory
from mooncake.transfer.pieces import Pieces, pieces_of, read_file, write_file
from mooncake.transfer.room import runs
from mooncake.transfer.staging import STAGING, staging


class FileRoom:
    """The bytes of a segment's file.  Ranges are flat lists: offset, length, ..."""

    def __init__(self, memory: SegmentMemory) -> None:
        self._memory = memory
        self._fd = memory.data_fd
        self._base = memory.base

    @contextmanager
    def filling(self) -> "Iterator[FileSteps]":
        """To copy pieces to ranges."""
        yield FileSteps(self.fill)

    @contextmanager
    def emptying(self) -> "Iterator[FileSteps]":
        """To copy ranges to pieces."""
        yield FileSteps(self.empty)

    def fill(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        """Pieces → ranges.  Raises TransferError."""
        self._check()  # writing would make it as long as before, with a hole
        for offset, part, staged in self._parts(ranges, pieces, trusted):
            if not staged:
                write_file(self._fd, self._base + offset, part)
                continue
            staging().fill(part, False)
            write_file(self._fd, self._base + offset, pieces_of([staging().address], [part.total]))

    def empty(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        """Ranges → pieces.  Raises TransferError."""
        for offset, part, staged in self._parts(ranges, pieces, trusted):
            if not staged:
                read_file(self._fd, self._base + offset, part)
                continue
            read_file(self._fd, self._base + offset, pieces_of([staging().address], [part.total]))
            staging().empty(part, False)
        self._check()  # what was cut off, before it was read, may be there again as zeros

    def close(self) -> None:
        """Nothing is held here."""

    def _check(self) -> None:
        if not self._memory.is_whole:
            raise TransferError("the segment's file has been cut short")

    def _parts(self, ranges: list[int], pieces: Pieces, trusted: bool) -> Iterator[tuple[int, Pieces, bool]]:
        """(offset, pieces, whether they are to be staged)."""
        staged = not trusted and driver.is_loaded() and _has_device(pieces)
        for offset, part in runs(ranges, pieces):
            if not staged:
                yield offset, part, False
                continue
            for start in range(0, part.total, STAGING):
                yield offset + start, part.part(start, min(STAGING, part.total - start)), True


class FileSteps:
    """As `room.Steps`; nothing goes on without the calling thread."""

    go_on = False

    def __init__(self, add: Callable[[list[int], Pieces, bool], None]) -> None:
        self.add = add


def _has_device(pieces: Pieces) -> bool:
    from mooncake.transfer.cuda.device import NO_GPU, kinds_of

    return bool((kinds_of(pieces) != NO_GPU).any())
