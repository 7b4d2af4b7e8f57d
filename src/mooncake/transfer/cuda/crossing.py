"""Copies between device and host memory, across the bus.

Scattered pieces pass through a little device memory of our own: the copy kernel gathers or scatters at the speed of
device memory, the copy engines cross the bus in few large copies.  So the bus runs at its full rate whatever the size
of the pieces, and the kernel takes multiprocessors for a small part of the time that it would need to write to host
memory itself.  Three lanes alternate: while one crosses the bus, the next is gathered.
"""

import ctypes
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mooncake.transfer.cuda import driver
from mooncake.transfer.cuda.driver import Context, call
from mooncake.transfer.cuda.lanes import CHUNK, LANES, TABLE, Lanes
from mooncake.transfer.cuda.pins import Run, pins
from mooncake.transfer.cuda.plan import Cuts, cut, descriptors, merge, pair
from mooncake.transfer.pieces import Int64Array, Pieces, pieces_of

DIRECT = 512 << 10  # bytes: pieces as large as this cross by themselves
FEW = 4  # pieces: so few do, too

_Room = tuple[int, int, int, bool]
"""A host range: address, length, offset in its chunk, whether it is pinned."""

_Chunk = tuple[int, int, list[_Room]]
"""Its descriptors [first, end), and its host ranges."""


class _Crossing:
    """Copies across the bus in one direction, in steps: each is given to the GPU, which goes on by itself."""

    function: str

    def __init__(self, context: Context, lanes: Lanes) -> None:
        self._context = context
        self._lanes = lanes
        self._chunks = 0  # so far; each takes the next lane
        self._rows = 0  # of the table that are in use

    def add(self, pieces: Pieces, host: Pieces) -> None:
        """Begin to copy between them."""
        with self._context.current():
            self._add(pieces, host)

    def finish(self) -> None:
        """Until all bytes are there."""
        with self._context.current():
            self._finish()

    def _add(self, pieces: Pieces, host: Pieces) -> None:
        pieces, host = merge(pieces), merge(host)
        runs, lanes = pins.split(host), self._lanes
        few = len(pieces.lengths) <= FEW or pieces.total >= DIRECT * len(pieces.lengths)
        if not lanes.memory or (few and all(is_pinned for *_, is_pinned in runs)):
            cut_host = pieces_of([address for address, _, _ in runs], [length for _, length, _ in runs])
            self._add_direct(*pair(pieces, cut_host))
            return
        for near, far in _batches(pieces, host):
            cuts = cut(near, CHUNK)
            if self._rows + len(cuts.starts) > TABLE:
                lanes.wait(lanes.kernels)
                self._rows = 0
            staged = lanes.memory + (self._chunks + cuts.starts // CHUNK) % LANES * CHUNK + cuts.starts % CHUNK
            table, wide = self._descriptors(cuts, staged)
            lanes.load(table, self._rows)
            self._add_staged(_chunks(cuts, _rooms(pins.split(far))), wide, int(cuts.lengths.max()))
            self._rows += len(table)

    def _add_direct(self, near: Int64Array, far: Int64Array, lengths: Int64Array) -> None:
        """Piece by piece by the copy engines."""
        lanes, last = self._lanes, len(lengths) - 1
        targets, sources = self._ends(near, far)
        for i, (to, at, length) in enumerate(zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True)):
            if i == last:
                lanes.mark_nearly(lanes.copies)
            call(self.function, to, at, length, lanes.copies)

    def _finish(self) -> None:
        raise NotImplementedError

    def _ends(self, near: Int64Array, far: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(targets, sources)."""
        raise NotImplementedError

    def _descriptors(self, cuts: Cuts, staged: Int64Array) -> tuple[npt.NDArray[np.int64], bool]:
        raise NotImplementedError

    def _add_staged(self, chunks: list[_Chunk], wide: bool, largest: int) -> None:
        raise NotImplementedError


class Outward(_Crossing):
    """From device to host memory."""

    function = "cuMemcpyDtoHAsync_v2"

    def __init__(self, context: Context, lanes: Lanes) -> None:
        super().__init__(context, lanes)
        self._waiting: list[list[tuple[int, int, int]]] = [[] for _ in range(LANES)]  # by lane: (from, to, length)

    def _finish(self) -> None:
        self._lanes.wait(self._lanes.copies, nearly=True)
        for lane in range(LANES):
            self._settle(lane)

    def _ends(self, near: Int64Array, far: Int64Array) -> tuple[Int64Array, Int64Array]:
        return far, near

    def _descriptors(self, cuts: Cuts, staged: Int64Array) -> tuple[npt.NDArray[np.int64], bool]:
        return descriptors(cuts.addresses, staged, cuts.lengths)

    def _add_staged(self, chunks: list[_Chunk], wide: bool, largest: int) -> None:
        lanes = self._lanes
        for i, (first, end, runs) in enumerate(chunks):
            lane = self._chunks % LANES
            if self._chunks >= LANES:
                driver.wait_in(lanes.kernels, lanes.by_copy[lane])
            self._settle(lane)
            lanes.launch(self._rows + first, end - first, wide, largest)
            driver.record(lanes.by_kernel[lane], lanes.kernels)
            driver.wait_in(lanes.copies, lanes.by_kernel[lane])
            if i == len(chunks) - 1:
                lanes.mark_nearly(lanes.copies)
            for address, length, at, is_pinned in runs:
                to = address
                if not is_pinned:
                    to = lanes.detour + lane * CHUNK + at
                    self._waiting[lane].append((to, address, length))
                call(self.function, to, lanes.memory + lane * CHUNK + at, length, lanes.copies)
            driver.record(lanes.by_copy[lane], lanes.copies)
            self._chunks += 1

    def _settle(self, lane: int) -> None:
        """What has come by the detour goes to its place."""
        waiting = self._waiting[lane]
        if waiting:
            driver.wait(self._lanes.by_copy[lane])
            for source, target, length in waiting:
                ctypes.memmove(target, source, length)
            waiting.clear()


class Inward(_Crossing):
    """From host to device memory."""

    function = "cuMemcpyHtoDAsync_v2"

    def _finish(self) -> None:
        lanes = self._lanes
        lanes.wait(lanes.copies, nearly=True)  # pieces that went by themselves are in this stream alone
        lanes.wait(lanes.kernels)

    def _ends(self, near: Int64Array, far: Int64Array) -> tuple[Int64Array, Int64Array]:
        return near, far

    def _descriptors(self, cuts: Cuts, staged: Int64Array) -> tuple[npt.NDArray[np.int64], bool]:
        return descriptors(staged, cuts.addresses, cuts.lengths)

    def _add_staged(self, chunks: list[_Chunk], wide: bool, largest: int) -> None:
        lanes = self._lanes
        for i, (first, end, runs) in enumerate(chunks):
            lane = self._chunks % LANES
            if self._chunks >= LANES:
                driver.wait_in(lanes.copies, lanes.by_kernel[lane])
                if not all(is_pinned for *_, is_pinned in runs):
                    driver.wait(lanes.by_copy[lane])  # the detour may still be read
            if i == len(chunks) - 1:
                lanes.mark_nearly(lanes.copies)
            for address, length, at, is_pinned in runs:
                source = address
                if not is_pinned:
                    source = lanes.detour + lane * CHUNK + at
                    ctypes.memmove(source, address, length)
                call(self.function, lanes.memory + lane * CHUNK + at, source, length, lanes.copies)
            driver.record(lanes.by_copy[lane], lanes.copies)
            driver.wait_in(lanes.kernels, lanes.by_copy[lane])
            lanes.launch(self._rows + first, end - first, wide, largest)
            driver.record(lanes.by_kernel[lane], lanes.kernels)
            self._chunks += 1


def _rooms(runs: list[Run]) -> list[list[_Room]]:
    """Host ranges by chunk."""
    rooms: list[list[_Room]] = [[]]
    at = 0
    for begin, length, is_pinned in runs:
        address, end = begin, begin + length
        while address < end:
            if at == CHUNK:
                rooms.append([])
                at = 0
            part = min(end - address, CHUNK - at)
            rooms[-1].append((address, part, at, is_pinned))
            address, at = address + part, at + part
    return rooms


def _chunks(cuts: Cuts, rooms: list[list[_Room]]) -> list[_Chunk]:
    firsts = cuts.firsts(CHUNK, int(cuts.starts[-1] + cuts.lengths[-1]))
    return [(firsts[chunk], firsts[chunk + 1], room) for chunk, room in enumerate(rooms)]


def _batches(pieces: Pieces, host: Pieces) -> Iterator[tuple[Pieces, Pieces]]:
    """Cut so that each has room in the table."""
    count = len(pieces.lengths)
    if count + pieces.total // CHUNK < TABLE:
        yield pieces, host
        return
    halves = slice(0, count // 2), slice(count // 2, count)
    near, far = (Pieces(pieces.addresses[half], pieces.lengths[half]) for half in halves)
    yield from _batches(near, host.part(0, near.total))
    yield from _batches(far, host.part(near.total, far.total))
