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
    from mooncake.transfer.cuda.crossing import Inward, Outward
    from mooncake.transfer.cuda.device import Device


class Room:
    """`size` bytes at `address`, which are the beginning of file `fd`.  Ranges are flat lists: offset, length, ..."""

    def __init__(self, address: int, fd: int, size: int) -> None:
        self._address = address
        self._fd = fd
        self._size = size
        self._is_pinned = False

    @contextmanager
    def filling(self) -> "Iterator[Steps]":
        """To copy pieces to ranges in several steps; at the end all bytes are there."""
        with ExitStack() as stack:
            yield Steps(self, stack, fill=True)

    @contextmanager
    def emptying(self) -> "Iterator[Steps]":
        """To copy ranges to pieces."""
        with ExitStack() as stack:
            yield Steps(self, stack, fill=False)

    def fill(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        """Pieces → ranges.  Raises TransferError."""
        with self.filling() as steps:
            steps.add(ranges, pieces, trusted)

    def empty(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        """Ranges → pieces.  Raises TransferError."""
        with self.emptying() as steps:
            steps.add(ranges, pieces, trusted)

    def close(self) -> None:
        """Before the memory is unmapped."""
        if self._is_pinned:
            from mooncake.transfer.cuda.pins import pins

            pins.release(self._address)

    # -- inside

    def copy_here(self, fill: bool, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        """By this thread: pieces → ranges if `fill`, or the other way."""
        for offset, part in runs(ranges, pieces):
            if trusted and (gather(part, self._address + offset) if fill else scatter(self._address + offset, part)):
                continue
            (write_file if fill else read_file)(self._fd, offset, part)

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


class Steps:
    """What GPUs have to do of each goes on while the next one is prepared."""

    def __init__(self, room: Room, stack: ExitStack, fill: bool) -> None:
        self._room = room
        self._stack = stack
        self._fill = fill
        self._crossings: dict[Device, Outward | Inward] = {}

    @property
    def go_on(self) -> bool:
        """Whether something goes on without this thread."""
        return bool(self._crossings)

    def add(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        """Copy between ranges and pieces of the same total.  Raises TransferError."""
        if trusted or not driver.is_loaded():
            self._room.copy_here(self._fill, ranges, pieces, trusted)
            return
        for device, at, part in _by_device(pieces):
            room = _part(ranges, at, part.total)
            if device is None:
                self._room.copy_here(self._fill, room, part, False)
                continue
            self._room.pin(device)
            self._crossing(device).add(part, self._room.host(room))

    def _crossing(self, device: "Device") -> "Outward | Inward":
        from mooncake.transfer.cuda.crossing import Inward, Outward

        known = self._crossings.get(device)
        if known is None:
            kind = Outward if self._fill else Inward
            known = self._crossings[device] = self._stack.enter_context(device.crossing(kind))
        return known


def runs(ranges: list[int], pieces: Pieces) -> Iterator[tuple[int, Pieces]]:
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
    from mooncake.transfer.cuda.device import device, kinds_of, only_kind_of

    hull = pieces.hull()
    only = only_kind_of(hull)
    if only is None and hull is not pieces:
        kinds = kinds_of(hull)
        only = int(kinds[0]) if kinds[0] >= 0 and (kinds == kinds[0]).all() else None
    if only is not None:
        yield device(only), 0, pieces
        return
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
