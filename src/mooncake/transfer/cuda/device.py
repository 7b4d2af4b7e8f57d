"""One GPU: moving bytes between scattered pieces of its memory and host memory, or within device memory.

Scattered pieces pass through a little device memory of our own: the copy kernel gathers or scatters at the speed of
device memory, the copy engines cross the bus in few large copies.  So the bus runs at its full rate whatever the size
of the pieces, and the kernel takes multiprocessors for a thirtieth of the time that it would need to write to host
memory itself.  Three lanes alternate: while one crosses the bus, the next is gathered.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake.errors import TransferError
from mooncake.transfer.cuda import driver
from mooncake.transfer.cuda.driver import Context, CudaError, call
from mooncake.transfer.cuda.pins import pins
from mooncake.transfer.cuda.plan import Cuts, cut, descriptors, merge, pair
from mooncake.transfer.pieces import Int64Array, Pieces, view

LANES = 3
CHUNK = 8 << 20  # bytes of a lane
DIRECT = 512 << 10  # bytes: pieces as large as this cross the bus by themselves
FEW = 4  # pieces: so few do, too
MOST_LANES = 4  # sets of lanes of a device: how many calls run at once
TABLE = 1 << 16  # descriptors of one call; a larger one is cut
_THREADS, _SLICE = 256, 32 << 10  # of copy.cu
_ROW = 24  # bytes of a descriptor
_WORD = 8
NO_GPU = -1  # host memory, in place of a GPU's number


class _Lanes:
    """What one call at a time uses.  Made, and used, in the device's context.

    Kernels run in one stream, copies across the bus in another, so that these follow one another without a gap; the
    events of each lane say to either when the other has done its part.
    """

    def __init__(self, with_memory: bool) -> None:
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

    def load(self, table: npt.NDArray[np.int64]) -> None:
        self._rows[: table.size] = table.ravel()

    def mark_nearly(self, stream: Any) -> None:
        """Little is left to do in `stream`: so far a waiting thread may sleep, waking up takes time."""
        driver.record(self._nearly, stream)

    def wait(self, stream: Any, nearly: bool = False) -> None:
        """Until all that `stream` has to do is done."""
        driver.record(self._end, stream)
        if nearly:
            driver.wait(self._nearly)
        driver.wait(self._end)


class Device:
    """Thread-safe; every method returns when all bytes are there.  Raises TransferError."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.context = Context(ordinal)
        with self.context.current():
            text = files(__package__).joinpath("copy.ptx").read_bytes()
            self._wide, self._narrow = driver.load_kernels(text, ["copy_wide", "copy_bytes"])
        self._free: list[_Lanes] = []
        self._made = 0
        self._lock = threading.Condition()
        with self._lanes():
            pass  # the first call need not wait for them

    def write_out(self, pieces: Pieces, host: Pieces) -> None:
        """Pieces of device memory → `host`, valid host memory of the same total."""
        pieces, host = merge(pieces), pins.split(merge(host))[0]
        with self._lanes() as lanes:
            if self._direct(lanes, pieces, host, "cuMemcpyDtoHAsync_v2"):
                return
            for near, far in _batches(pieces, host):
                self._gather(lanes, near, far)

    def read_in(self, host: Pieces, pieces: Pieces) -> None:
        """The other way."""
        pieces, host = merge(pieces), pins.split(merge(host))[0]
        with self._lanes() as lanes:
            if self._direct(lanes, pieces, host, "cuMemcpyHtoDAsync_v2"):
                return
            for near, far in _batches(pieces, host):
                self._scatter(lanes, near, far)

    def copy(self, source: Pieces, target: Pieces) -> None:
        """Within device memory of any GPUs that this one can reach."""
        sources, targets, lengths = pair(source, target)
        with self._lanes() as lanes:
            if len(lengths) <= FEW:
                for to, at, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
                    call("cuMemcpyDtoDAsync_v2", to, at, length, lanes.kernels)
                lanes.wait(lanes.kernels)
                return
            for first in range(0, len(lengths), TABLE):
                end = first + TABLE
                table, wide = descriptors(sources[first:end], targets[first:end], lengths[first:end])
                lanes.load(table)
                self._launch(lanes, 0, len(table), wide, int(lengths[first:end].max()))
                lanes.wait(lanes.kernels)

    # -- inside

    @contextmanager
    def _lanes(self) -> Iterator[_Lanes]:
        """Lanes for one call, in this device's context."""
        with self.context.current():
            lanes = self._take()
            try:
                yield lanes
            except BaseException:
                for stream in (lanes.kernels, lanes.copies):  # nothing may still be under way
                    with suppress(CudaError):
                        lanes.wait(stream)
                raise
            finally:
                with self._lock:
                    self._free.append(lanes)
                    self._lock.notify()

    def _take(self) -> _Lanes:
        with self._lock:
            while True:
                if self._free:
                    return self._free.pop()
                if self._made < MOST_LANES:
                    try:
                        lanes = _Lanes(with_memory=True)
                    except CudaError:
                        if not self._made:  # no device memory is left at all: pieces go one by one
                            lanes = _Lanes(with_memory=False)
                            self._made = MOST_LANES
                            return lanes
                    else:
                        self._made += 1
                        return lanes
                self._lock.wait()

    def _direct(self, lanes: _Lanes, pieces: Pieces, host: Pieces, function: str) -> bool:
        """Piece by piece by the copy engines, if that is best; whether it was."""
        few = len(pieces.lengths) <= FEW or pieces.total >= DIRECT * len(pieces.lengths)
        if lanes.memory and not (few and pins.split(host)[1].all()):
            return False
        near, far, lengths = pair(pieces, host)
        out, last = function == "cuMemcpyDtoHAsync_v2", len(lengths) - 1
        for i, (at, to, length) in enumerate(zip(near.tolist(), far.tolist(), lengths.tolist(), strict=True)):
            if i == last:
                lanes.mark_nearly(lanes.copies)
            call(function, *((to, at) if out else (at, to)), length, lanes.copies)
        lanes.wait(lanes.copies, nearly=True)
        return True

    def _gather(self, lanes: _Lanes, pieces: Pieces, host: Pieces) -> None:
        cuts, rooms, pinned = self._stage(pieces, host)
        table, wide = descriptors(cuts.addresses, _staged(cuts.starts, lanes.memory), cuts.lengths)
        lanes.load(table)
        largest = int(cuts.lengths.max())
        waiting: list[list[tuple[int, int, int]]] = [[] for _ in range(LANES)]  # by lane: (from, to, length)
        chunks = _chunks(cuts, rooms, pinned)
        for chunk, (first, end, runs) in enumerate(chunks):
            lane = chunk % LANES
            if chunk >= LANES:
                driver.wait_in(lanes.kernels, lanes.by_copy[lane])
            self._settle(lanes, lane, waiting[lane])
            self._launch(lanes, first, end - first, wide, largest)
            driver.record(lanes.by_kernel[lane], lanes.kernels)
            driver.wait_in(lanes.copies, lanes.by_kernel[lane])
            if chunk == len(chunks) - 1:
                lanes.mark_nearly(lanes.copies)
            for address, length, at, is_pinned in runs:
                from_device = lanes.memory + lane * CHUNK + at
                to = address
                if not is_pinned:
                    to = lanes.detour + lane * CHUNK + at
                    waiting[lane].append((to, address, length))
                call("cuMemcpyDtoHAsync_v2", to, from_device, length, lanes.copies)
            driver.record(lanes.by_copy[lane], lanes.copies)
        lanes.wait(lanes.copies, nearly=True)
        for lane in range(LANES):
            self._settle(lanes, lane, waiting[lane])

    def _settle(self, lanes: _Lanes, lane: int, waiting: list[tuple[int, int, int]]) -> None:
        """What has come by the detour goes to its place."""
        if waiting:
            driver.wait(lanes.by_copy[lane])
            for source, target, length in waiting:
                ctypes.memmove(target, source, length)
            waiting.clear()

    def _scatter(self, lanes: _Lanes, pieces: Pieces, host: Pieces) -> None:
        cuts, rooms, pinned = self._stage(pieces, host)
        table, wide = descriptors(_staged(cuts.starts, lanes.memory), cuts.addresses, cuts.lengths)
        lanes.load(table)
        largest = int(cuts.lengths.max())
        chunks = _chunks(cuts, rooms, pinned)
        for chunk, (first, end, runs) in enumerate(chunks):
            lane = chunk % LANES
            if chunk >= LANES:
                driver.wait_in(lanes.copies, lanes.by_kernel[lane])
                if not all(is_pinned for *_, is_pinned in runs):
                    driver.wait(lanes.by_copy[lane])  # the detour may still be read
            if chunk == len(chunks) - 1:
                lanes.mark_nearly(lanes.copies)
            for address, length, at, is_pinned in runs:
                source = address
                if not is_pinned:
                    source = lanes.detour + lane * CHUNK + at
                    ctypes.memmove(source, address, length)
                call("cuMemcpyHtoDAsync_v2", lanes.memory + lane * CHUNK + at, source, length, lanes.copies)
            driver.record(lanes.by_copy[lane], lanes.copies)
            driver.wait_in(lanes.kernels, lanes.by_copy[lane])
            self._launch(lanes, first, end - first, wide, largest)
            driver.record(lanes.by_kernel[lane], lanes.kernels)
        lanes.wait(lanes.kernels, nearly=True)

    def _stage(self, pieces: Pieces, host: Pieces) -> tuple[Cuts, Cuts, list[bool]]:
        rooms = cut(host, CHUNK)
        return cut(pieces, CHUNK), rooms, pins.split(Pieces(rooms.addresses, rooms.lengths))[1].tolist()

    def _launch(self, lanes: _Lanes, first: int, count: int, wide: bool, largest: int) -> None:
        slices = min(-(-largest // _SLICE), 65535)
        kernel = self._wide if wide else self._narrow
        driver.launch(kernel, (count, slices), _THREADS, lanes.table + first * _ROW, lanes.kernels)


@cache
def _device(ordinal: int) -> Device:
    return Device(ordinal)


_making = threading.Lock()


def device(ordinal: int) -> Device:
    """The one Device of a GPU of this process.  Raises CudaError."""
    with _making:
        return _device(ordinal)


os.register_at_fork(after_in_child=_device.cache_clear)


def kinds_of(pieces: Pieces) -> npt.NDArray[np.int64]:
    """For each piece the GPU whose memory it is, NO_GPU if it is none's.  Raises TransferError for one that runs over
    the end of its allocation: a kernel that touched what is not there would end the whole process's CUDA."""
    kinds = np.full(len(pieces.lengths), NO_GPU, np.int64)
    first, last = pieces.addresses, pieces.addresses + pieces.lengths
    left = np.ones(len(first), bool)
    while left.any():
        at = int(first[int(np.argmax(left))])
        allocation = driver.range_of(at)
        if allocation is None:
            left &= first != at
            continue
        inside = left & (first >= allocation.base) & (first < allocation.end)
        over = int(last[inside].max())
        if over > allocation.end and driver.run_of(allocation, over).end < over:
            raise TransferError(f"a piece in the device allocation at {allocation.base:#x} runs over its end")
        kinds[inside] = allocation.device
        left &= ~inside
    return kinds


def _staged(starts: Int64Array, memory: int) -> Int64Array:
    """Where in the lanes a byte at `starts` of the whole has its place."""
    return np.asarray(memory + starts // CHUNK % LANES * CHUNK + starts % CHUNK)


def _chunks(cuts: Cuts, rooms: Cuts, pinned: list[bool]) -> list[tuple[int, int, list[tuple[int, int, int, bool]]]]:
    """For each chunk: its descriptors [first, end), and its host ranges: (address, length, offset in it, pinned)."""
    total = int(cuts.starts[-1] + cuts.lengths[-1])
    firsts, bounds = cuts.firsts(CHUNK, total), rooms.firsts(CHUNK, total)
    offsets = (rooms.starts % CHUNK).tolist()
    ranges = list(zip(rooms.addresses.tolist(), rooms.lengths.tolist(), offsets, pinned, strict=True))
    return [
        (firsts[chunk], firsts[chunk + 1], ranges[bounds[chunk] : bounds[chunk + 1]])
        for chunk in range(len(firsts) - 1)
    ]


def _batches(pieces: Pieces, host: Pieces) -> Iterator[tuple[Pieces, Pieces]]:
    """Cut so that each has room in the table."""
    count = len(pieces.lengths)
    if count + pieces.total // CHUNK < TABLE:
        yield pieces, host
        return
    near, far = (Pieces(pieces.addresses[part], pieces.lengths[part]) for part in _halves(count))
    yield from _batches(near, host.part(0, near.total))
    yield from _batches(far, host.part(near.total, far.total))


def _halves(count: int) -> tuple[slice, slice]:
    return slice(0, count // 2), slice(count // 2, count)
