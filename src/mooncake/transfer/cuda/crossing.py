"""Copies between device and host memory, across the bus.

Scattered pieces pass through a little device memory of our own: the copy kernel gathers or scatters at the speed of
device memory, the copy engines cross the bus in few large copies.  So the bus runs at its full rate whatever the size
of the pieces, and the kernel takes multiprocessors for a small part of the time that it would need to write to host
memory itself.  Two lanes alternate: while one crosses the bus, the next is gathered.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from mooncake.transfer.blocks import BlockVector
from mooncake.transfer.cuda import driver
from mooncake.transfer.cuda.driver import Context, call
from mooncake.transfer.cuda.lanes import CHUNK, LANES, TABLE, Lanes, Window
from mooncake.transfer.cuda.pins import Run, pins
from mooncake.transfer.cuda.plan import WIDE, Cuts, cut, descriptors, merge, pair
from mooncake.transfer.pieces import Int64Array, Pieces, pieces_of

DIRECT = 512 << 10  # bytes: pieces as large as this cross by themselves
FEW = 4  # pieces: so few do, too

_Room = tuple[int, int, int, bool]
"""A host range: address, length, offset in its chunk, whether it is pinned."""

_Launch = Callable[[int, int], None]
"""Have the kernel copy a chunk (by its number in a batch) from or to its lane's memory (its address)."""

_BLOCKS = 1 << 15  # of one table


class _Crossing:
    """Copies across the bus in one direction, in steps: each is given to the GPU, which goes on by itself."""

    function: str
    inward: bool

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
        if isinstance(pieces, BlockVector) and self._lanes.memory and pieces.shape.largest < DIRECT:
            size = pieces.shape.block_bytes * _BLOCKS
            for start in range(0, pieces.total, size):
                part = pieces.part(start, min(size, pieces.total - start))
                assert isinstance(part, BlockVector)
                self._add_blocks(part, merge(host if part.total == pieces.total else host.part(start, part.total)))
            return
        pieces, host = merge(pieces), merge(host)
        runs, lanes = pins.split(host), self._lanes
        few = len(pieces.lengths) <= FEW or pieces.total >= DIRECT * len(pieces.lengths)
        all_pinned = all(is_pinned for *_, is_pinned in runs)
        if all_pinned and (few or not lanes.memory):
            cut_host = pieces_of([address for address, _, _ in runs], [length for _, length, _ in runs])
            self._add_direct(*pair(pieces, cut_host))
            return
        if not lanes.memory:
            for start in range(0, pieces.total, CHUNK):
                length = min(CHUNK, pieces.total - start)
                self._pass_detour(pieces.part(start, length), host.part(start, length))
            return
        for near, far in _batches(pieces, host):
            cuts = cut(near, CHUNK)
            self._make_room(len(cuts.starts))
            staged = lanes.memory + (self._chunks + cuts.starts // CHUNK) % LANES * CHUNK + cuts.starts % CHUNK
            table, wide = self._descriptors(cuts, staged)
            firsts = cuts.firsts(CHUNK, near.total)
            launch = partial(self._launch_pieces, self._rows, firsts, wide, int(cuts.lengths.max()))
            self._rows = lanes.load(table, self._rows)
            self._add_staged(_rooms(pins.split(far)), launch)

    def _add_blocks(self, blocks: BlockVector, host: Pieces) -> None:
        lanes, shape = self._lanes, blocks.shape
        self._make_room((shape.table.size + len(blocks.blocks)) // 3 + 2)
        numbers = lanes.load(shape.table, self._rows)
        window = Window(lanes.address_of(self._rows), lanes.address_of(numbers), len(shape.sizes), shape.block_bytes)
        self._rows = lanes.load(np.array(blocks.blocks, np.int64), numbers)
        window.inward = self.inward
        launch = partial(self._launch_blocks, window, blocks.total, shape.grain % WIDE == 0, shape.largest)
        self._add_staged(_rooms(pins.split(host)), launch)

    def _make_room(self, rows: int) -> None:
        """In the table."""
        if self._rows + rows > TABLE:
            self._lanes.wait(self._lanes.kernels)
            self._rows = 0

    def _launch_pieces(self, row: int, firsts: list[int], wide: bool, largest: int, chunk: int, _: int) -> None:
        self._lanes.launch(row + firsts[chunk], firsts[chunk + 1] - firsts[chunk], wide, largest)

    def _launch_blocks(self, window: Window, total: int, wide: bool, largest: int, chunk: int, staged: int) -> None:
        start = chunk * CHUNK
        end = min(start + CHUNK, total)
        first, last = start // window.size, -(-end // window.size)
        window.first, window.start, window.end, window.staged = first, start, end, staged
        self._lanes.launch_blocks(window, (last - first) * window.pieces, wide, largest)

    def _add_direct(self, near: Int64Array, far: Int64Array, lengths: Int64Array) -> None:
        """Piece by piece by the copy engines."""
        lanes, last = self._lanes, len(lengths) - 1
        targets, sources = self._ends(near, far)
        for i, (to, at, length) in enumerate(zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True)):
            if i == last:
                lanes.mark_nearly(lanes.copies)
            call(self.function, to, at, length, lanes.copies)

    def _pass_detour(self, pieces: Pieces, host: Pieces) -> None:
        """Copy a chunk between the pieces and memory that is not pinned, where the GPU has no room for lanes."""
        raise NotImplementedError

    def _move_detour(self, pieces: Pieces) -> None:
        """Copy between the pieces and the beginning of the detour; the bytes are there."""
        self._add_direct(*pair(pieces, pieces_of([self._lanes.detour], [pieces.total])))
        self._lanes.wait(self._lanes.copies)

    def _finish(self) -> None:
        raise NotImplementedError

    def _ends(self, near: Int64Array, far: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(targets, sources)."""
        raise NotImplementedError

    def _descriptors(self, cuts: Cuts, staged: Int64Array) -> tuple[npt.NDArray[np.int64], bool]:
        raise NotImplementedError

    def _add_staged(self, rooms: list[list[_Room]], launch: _Launch) -> None:
        """`rooms`: host ranges by chunk."""
        raise NotImplementedError


class Outward(_Crossing):
    """From device to host memory."""

    function, inward = "cuMemcpyDtoHAsync_v2", False

    def __init__(self, context: Context, lanes: Lanes) -> None:
        super().__init__(context, lanes)
        self._waiting: list[list[tuple[int, int, int]]] = [[] for _ in range(LANES)]  # by lane: (from, to, length)

    def _finish(self) -> None:
        self._lanes.wait(self._lanes.copies, nearly=True)
        for lane in range(LANES):
            self._settle(lane)

    def _pass_detour(self, pieces: Pieces, host: Pieces) -> None:
        self._move_detour(pieces)
        source = self._lanes.detour
        for target, length in zip(host.addresses.tolist(), host.lengths.tolist(), strict=True):
            ctypes.memmove(target, source, length)
            source += length

    def _ends(self, near: Int64Array, far: Int64Array) -> tuple[Int64Array, Int64Array]:
        return far, near

    def _descriptors(self, cuts: Cuts, staged: Int64Array) -> tuple[npt.NDArray[np.int64], bool]:
        return descriptors(cuts.addresses, staged, cuts.lengths)

    def _add_staged(self, rooms: list[list[_Room]], launch: _Launch) -> None:
        lanes = self._lanes
        for i, runs in enumerate(rooms):
            lane = self._chunks % LANES
            if self._chunks >= LANES:
                driver.wait_in(lanes.kernels, lanes.by_copy[lane])
            self._settle(lane)
            launch(i, lanes.memory + lane * CHUNK)
            driver.record(lanes.by_kernel[lane], lanes.kernels)
            driver.wait_in(lanes.copies, lanes.by_kernel[lane])
            if i == len(rooms) - 1:
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

    function, inward = "cuMemcpyHtoDAsync_v2", True

    def _finish(self) -> None:
        lanes = self._lanes
        lanes.wait(lanes.copies, lanes.kernels, nearly=True)  # the former for pieces that went by themselves

    def _pass_detour(self, pieces: Pieces, host: Pieces) -> None:
        target = self._lanes.detour
        for source, length in zip(host.addresses.tolist(), host.lengths.tolist(), strict=True):
            ctypes.memmove(target, source, length)
            target += length
        self._move_detour(pieces)

    def _ends(self, near: Int64Array, far: Int64Array) -> tuple[Int64Array, Int64Array]:
        return near, far

    def _descriptors(self, cuts: Cuts, staged: Int64Array) -> tuple[npt.NDArray[np.int64], bool]:
        return descriptors(staged, cuts.addresses, cuts.lengths)

    def _add_staged(self, rooms: list[list[_Room]], launch: _Launch) -> None:
        lanes = self._lanes
        for i, runs in enumerate(rooms):
            lane = self._chunks % LANES
            if self._chunks >= LANES:
                driver.wait_in(lanes.copies, lanes.by_kernel[lane])
                if not all(is_pinned for *_, is_pinned in runs):
                    driver.wait(lanes.by_copy[lane])  # the detour may still be read
            if i == len(rooms) - 1:
                lanes.mark_nearly(lanes.copies)
            for address, length, at, is_pinned in runs:
                source = address
                if not is_pinned:
                    source = lanes.detour + lane * CHUNK + at
                    ctypes.memmove(source, address, length)
                call(self.function, lanes.memory + lane * CHUNK + at, source, length, lanes.copies)
            driver.record(lanes.by_copy[lane], lanes.copies)
            driver.wait_in(lanes.kernels, lanes.by_copy[lane])
            launch(i, lanes.memory + lane * CHUNK)
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
