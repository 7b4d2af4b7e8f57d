"""Shared memory that pieces are copied to and from: a mapped segment, or a staging buffer.

Three ways: memory that is known to be mapped is copied by numpy, device memory by its GPU, everything else by the
kernel, to which a bad address is an error and not a crash.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np

from mooncake.transfer.cuda import driver
from mooncake.transfer.pieces import Pieces, gather, pieces_of, read_file, scatter, write_file

if TYPE_CHECKING:
    from mooncake.transfer.cuda.crossing import Outward
    from mooncake.transfer.cuda.device import Device


class Room:
    """`size` bytes at `address`, which are the beginning of file `fd`.  Ranges are flat lists: offset, length, ..."""

    def __init__(self, address: int, fd: int, size: int) -> None:
        self._address = address
        self._fd = fd
        self._size = size
        self._is_pinned = False

    @contextmanager
    def filling(self) -> "Iterator[Filling]":
        """To fill in several steps; at the end all bytes are there."""
        with ExitStack() as stack:
            yield Filling(self, stack)

    def fill(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        """Pieces → ranges.  Raises TransferError."""
        with self.filling() as filling:
            filling.fill(ranges, pieces, trusted)

    def empty(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        """Ranges → pieces.  Raises TransferError."""
        if not trusted and driver.is_loaded():
            for device, at, part in _by_device(pieces):
                if device is None:
                    self._empty(_part(ranges, at, part.total), part, False)
                else:
                    self.pin(device)
                    device.read_in(self.host(_part(ranges, at, part.total)), part)
            return
        self._empty(ranges, pieces, trusted)

    def close(self) -> None:
        """Before the memory is unmapped."""
        if self._is_pinned:
            from mooncake.transfer.cuda.pins import pins

            pins.release(self._address)

    # -- inside

    def fill_here(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        for offset, part in _runs(ranges, pieces):
            if not (trusted and gather(part, self._address + offset)):
                write_file(self._fd, offset, part)

    def _empty(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        for offset, part in _runs(ranges, pieces):
            if not (trusted and scatter(self._address + offset, part)):
                read_file(self._fd, offset, part)

    def host(self, ranges: list[int]) -> Pieces:
        """Ranges as addresses."""
        flat = np.array(ranges, np.int64)
        return Pieces(flat[0::2] + self._address, flat[1::2].copy())

    def pin(self, device: "Device") -> None:
        """Have the memory pinned, unless that has been asked for already."""
        if not self._is_pinned:
            from mooncake.transfer.cuda.pins import pins

            self._is_pinned = True
            pins.want(device.context, self._address, self._size)


class Filling:
    """Steps of filling a room.  What GPUs have to do goes on while the next step is prepared."""

    def __init__(self, room: Room, stack: ExitStack) -> None:
        self._room = room
        self._stack = stack
        self._outward: dict[Device, Outward] = {}

    def fill(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        """Pieces → ranges.  Raises TransferError."""
        if trusted or not driver.is_loaded():
            self._room.fill_here(ranges, pieces, trusted)
            return
        for device, at, part in _by_device(pieces):
            room = _part(ranges, at, part.total)
            if device is None:
                self._room.fill_here(room, part, False)
                continue
            self._room.pin(device)
            if device not in self._outward:
                self._outward[device] = self._stack.enter_context(device.writing_out())
            self._outward[device].add(part, self._room.host(room))


def _runs(ranges: list[int], pieces: Pieces) -> Iterator[tuple[int, Pieces]]:
    """(offset, pieces) of each range."""
    if len(ranges) == 2:
        yield ranges[0], pieces
        return
    at = 0
    for i in range(0, len(ranges), 2):
        yield ranges[i], pieces.part(at, ranges[i + 1])
        at += ranges[i + 1]


def _by_device(pieces: Pieces) -> "Iterator[tuple[Device | None, int, Pieces]]":
    """Runs of pieces of one kind: (the GPU whose memory they are, None for host memory; where they begin; they)."""
    from mooncake.transfer.cuda.device import device, kinds_of

    kinds = kinds_of(pieces)
    breaks = np.flatnonzero(np.diff(kinds)) + 1
    at = 0
    for first, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(kinds)], strict=True):
        part = Pieces(pieces.addresses[first:end], pieces.lengths[first:end])
        ordinal = int(kinds[first])
        yield None if ordinal < 0 else device(ordinal), at, part
        at += part.total


def _part(ranges: list[int], start: int, length: int) -> list[int]:
    """Bytes [start, start + length) of the ranges."""
    if start == 0 and sum(ranges[1::2]) == length:
        return ranges
    flat = pieces_of(ranges[0::2], ranges[1::2]).part(start, length)
    return [int(x) for pair in zip(flat.addresses, flat.lengths, strict=True) for x in pair]
