"""What one call at a time needs of a GPU: two streams, their events, staging memory, and room for descriptors."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake.transfer.cuda import driver
from mooncake.transfer.pieces import view

LANES = 2
CHUNK = 32 << 20  # bytes of a lane
TABLE = 1 << 16  # descriptors; a larger batch is cut
_THREADS, _SLICE = 256, 32 << 10  # of copy.cu
_ROW = 24  # bytes of a descriptor
_WORD = 8


class Window(ctypes.Structure):
    """As in copy.cu: what of some blocks lies in bytes [start, end) of the whole, and is or shall be at `staged`."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("shape", "blocks", "pieces", "size", "first", "start", "end", "staged", "inward")
    )


class Lanes:
    """What one call at a time uses.  Made, and used, in the device's context.

    Kernels run in one stream, copies across the bus in another, so that these follow one another without a gap; the
    events of each lane say to either when the other has done its part.
    """

    def __init__(self, functions: list[Any], with_memory: bool) -> None:
        """`functions`: the copy kernel that is wide and the one for any bytes, and those of blocks."""
        self._wide, self._narrow, self._blocks_wide, self._blocks_narrow = functions
        self.memory = driver.allocate(LANES * CHUNK) if with_memory else 0
        self.kernels, self.copies = driver.new_stream(), driver.new_stream()
        self.by_kernel = [driver.new_event() for _ in range(LANES)]
        self.by_copy = [driver.new_event() for _ in range(LANES)]
        self.table = driver.allocate_pinned(TABLE * _ROW)
        self._nearly, self._end = driver.new_event(sleeps=True), driver.new_event()
        self._detour = 0
        self._rows: npt.NDArray[np.int64] = view(self.table, TABLE * 3, _WORD).view(np.int64)

    @property
    def detour(self) -> int:
        """Pinned host memory, as large as the lanes: the way to memory that is not pinned."""
        if not self._detour:
            self._detour = driver.allocate_pinned(LANES * CHUNK)
        return self._detour

    def load(self, table: npt.NDArray[np.int64], row: int) -> int:
        """Descriptors, or other numbers, from that row of the table on; the next free row."""
        end = row * 3 + table.size
        self._rows[row * 3 : end] = table.ravel()
        return -(-end // 3)

    def address_of(self, row: int) -> int:
        return self.table + row * _ROW

    def mark_nearly(self, stream: Any) -> None:
        """Little is left to do in `stream`: so far a waiting thread may sleep, waking up takes time."""
        driver.record(self._nearly, stream)

    def wait(self, *streams: Any, nearly: bool = False) -> None:
        """Until all that they have to do is done."""
        if nearly:
            driver.wait(self._nearly)
        for stream in streams:
            driver.record(self._end, stream)
            driver.wait(self._end)

    def launch(self, row: int, count: int, wide: bool, largest: int) -> None:
        """The copy kernel for `count` descriptors of the table; `largest` bytes is the largest."""
        kernel = self._wide if wide else self._narrow
        address = ctypes.c_uint64(self.address_of(row))
        driver.launch(kernel, (count, _slices(largest)), _THREADS, address, self.kernels)

    def launch_blocks(self, window: Window, count: int, wide: bool, largest: int) -> None:
        """The kernel of blocks, for `count` pieces."""
        kernel = self._blocks_wide if wide else self._blocks_narrow
        driver.launch(kernel, (count, _slices(largest)), _THREADS, window, self.kernels)


def _slices(largest: int) -> int:
    return min(-(-largest // _SLICE), 65535)
