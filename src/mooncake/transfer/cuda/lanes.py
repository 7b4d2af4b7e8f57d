"""What one call at a time needs of a GPU: two streams, their events, staging memory, and room for descriptors."""

from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake.transfer.cuda import driver
from mooncake.transfer.pieces import view

LANES = 3
CHUNK = 8 << 20  # bytes of a lane
TABLE = 1 << 16  # descriptors; a larger batch is cut
_THREADS, _SLICE = 256, 32 << 10  # of copy.cu
_ROW = 24  # bytes of a descriptor
_WORD = 8


class Lanes:
    """What one call at a time uses.  Made, and used, in the device's context.

    Kernels run in one stream, copies across the bus in another, so that these follow one another without a gap; the
    events of each lane say to either when the other has done its part.
    """

    def __init__(self, functions: list[Any], with_memory: bool) -> None:
        """`functions`: the copy kernel that is wide, and the one for any bytes."""
        self._wide, self._narrow = functions
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

    def load(self, table: npt.NDArray[np.int64], row: int) -> None:
        """Descriptors, from that row of the table on."""
        self._rows[row * 3 : row * 3 + table.size] = table.ravel()

    def mark_nearly(self, stream: Any) -> None:
        """Little is left to do in `stream`: so far a waiting thread may sleep, waking up takes time."""
        driver.record(self._nearly, stream)

    def wait(self, stream: Any, nearly: bool = False) -> None:
        """Until all that `stream` has to do is done."""
        driver.record(self._end, stream)
        if nearly:
            driver.wait(self._nearly)
        driver.wait(self._end)

    def launch(self, row: int, count: int, wide: bool, largest: int) -> None:
        """The copy kernel for `count` descriptors of the table; `largest` bytes is the largest."""
        slices = min(-(-largest // _SLICE), 65535)
        kernel = self._wide if wide else self._narrow
        driver.launch(kernel, (count, slices), _THREADS, self.table + row * _ROW, self.kernels)
