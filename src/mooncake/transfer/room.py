"""Shared memory that pieces are copied to and from: a mapped segment, or a staging buffer.

Three ways: memory that is known to be mapped is copied by numpy, device memory by its GPU, everything else by the
kernel, to which a bad address is an error and not a crash.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from mooncake.transfer.cuda import driver
from mooncake.transfer.pieces import Pieces, gather, pieces_of, read_file, scatter, write_file

if TYPE_CHECKING:
    from mooncake.transfer.cuda.device import Device


class Room:
    """`size` bytes at `address`, which are the beginning of file `fd`.  Ranges are flat lists: offset, length, ..."""

    def __init__(self, address: int, fd: int, size: int) -> None:
        self._address = address
        self._fd = fd
        self._size = size
        self._is_pinned = False

    def fill(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        """Pieces → ranges.  Raises TransferError."""
        if not trusted and driver.is_loaded():
            for device, at, part in _by_device(pieces):
                if device is None:
                    self._fill(_part(ranges, at, part.total), part, False)
                else:
                    self._pin(device)
                    device.write_out(part, self._host(_part(ranges, at, part.total)))
            return
        self._fill(ranges, pieces, trusted)

    def empty(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        """Ranges → pieces.  Raises TransferError."""
        if not trusted and driver.is_loaded():
            for device, at, part in _by_device(pieces):
                if device is None:
                    self._empty(_part(ranges, at, part.total), part, False)
                else:
                    self._pin(device)
                    device.read_in(self._host(_part(ranges, at, part.total)), part)
            return
        self._empty(ranges, pieces, trusted)

    def close(self) -> None:
        """Before the memory is unmapped."""
        if self._is_pinned:
            from mooncake.transfer.cuda.pins import pins

            pins.release(self._address)

    # -- inside

    def _fill(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        for offset, part in _runs(ranges, pieces):
            if not (trusted and gather(part, self._address + offset)):
                write_file(self._fd, offset, part)

    def _empty(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        for offset, part in _runs(ranges, pieces):
            if not (trusted and scatter(self._address + offset, part)):
                read_file(self._fd, offset, part)

    def _host(self, ranges: list[int]) -> Pieces:
        flat = np.array(ranges, np.int64)
        return Pieces(flat[0::2] + self._address, flat[1::2].copy())

    def _pin(self, device: "Device") -> None:
        if not self._is_pinned:
            from mooncake.transfer.cuda.pins import pins

            self._is_pinned = True
            pins.want(device.context, self._address, self._size)


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
