"""Pieces to and from a tcp stream, the same for every data stream and for both of its ends.

Small pieces pass through a staging buffer (gather, then one large send; one large receive, then scatter); large ones
go straight from and to their place.  Memory not known to be mapped (`trusted` False) is only touched by the kernel.
"""

import mmap
import os
import socket
import threading
import time

import numpy as np

from mooncake.errors import TransferTimedOut
from mooncake.transfer.pieces import Pieces, gather, read_file, scatter, view, write_file
from mooncake.transfer.stream import receive, send

STAGING = 4 << 20
DIRECT = 512 << 10  # pieces of this size and more are not staged
LARGE_STEP = 64 << 20  # of a large piece, between two looks at the clock
FOREVER = float("inf")


def send_pieces(sock: socket.socket, pieces: Pieces, trusted: bool, deadline: float = FOREVER) -> None:
    """All of `pieces`, in order.  Raises OSError (EFAULT: bad memory), TransferTimedOut at the deadline (monotonic)."""
    for chunk in _chunks(pieces):
        if len(chunk.addresses) > 1:
            check_clock(deadline)
            send(sock, _staging().fill(chunk, trusted))
            continue
        for part in _large(chunk):
            check_clock(deadline)
            send(sock, part)


def receive_pieces(sock: socket.socket, pieces: Pieces, trusted: bool, deadline: float = FOREVER) -> None:
    """Fill `pieces`, in order.  Raises as `send_pieces`, and EOFError when the peer is gone."""
    for chunk in _chunks(pieces):
        if len(chunk.addresses) > 1:
            check_clock(deadline)
            staging = _staging()
            receive(sock, staging.memory[: chunk.total])
            staging.empty(chunk, trusted)
            continue
        for part in _large(chunk):
            check_clock(deadline)
            receive(sock, part)


def check_clock(deadline: float) -> None:
    if deadline is not FOREVER and time.monotonic() > deadline:
        raise TransferTimedOut("the transfer did not end within its time limit")


class Staging:
    """A thread's staging buffer: a memfd, so that the kernel can fill it from addresses that may be bad."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("mooncake-staging", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, STAGING)
        self._mapping = mmap.mmap(self.fd, STAGING)
        self.memory = memoryview(self._mapping)
        self._array = np.frombuffer(self._mapping, np.uint8)
        self.address = int(self._array.ctypes.data)

    def __del__(self) -> None:
        os.close(self.fd)

    def fill(self, pieces: Pieces, trusted: bool) -> memoryview:
        if not (trusted and gather(pieces, self.address)):
            write_file(self.fd, 0, pieces)
        return self.memory[: pieces.total]

    def empty(self, pieces: Pieces, trusted: bool) -> None:
        if not (trusted and scatter(self.address, pieces)):
            read_file(self.fd, 0, pieces)


class _Local(threading.local):
    staging: Staging | None = None


_local = _Local()


def _staging() -> Staging:
    if _local.staging is None:
        _local.staging = Staging()
    return _local.staging


def _chunks(pieces: Pieces) -> list[Pieces]:
    """Single large pieces, or runs of small ones that fit the staging buffer."""
    return [Pieces(pieces.addresses[first:end], pieces.lengths[first:end]) for first, end in _steps(pieces)]


def _steps(pieces: Pieces) -> list[tuple[int, int]]:
    lengths = pieces.lengths
    if len(lengths) == 1:
        return [(0, 1)]
    if (lengths == lengths[0]).all():
        step = max(1, STAGING // int(lengths[0])) if lengths[0] < DIRECT else 1
        return [(i, min(i + step, len(lengths))) for i in range(0, len(lengths), step)]
    steps, first, held = [], 0, 0
    for i, length in enumerate(lengths.tolist()):
        if length >= DIRECT or held + length > STAGING:
            if i > first:
                steps.append((first, i))
            first, held = i, 0
            if length >= DIRECT:
                steps.append((i, i + 1))
                first = i + 1
                continue
        held += length
    if first < len(lengths):
        steps.append((first, len(lengths)))
    return steps


def _large(piece: Pieces) -> list[memoryview]:
    """The memory of a single piece, in steps."""
    address, length = int(piece.addresses[0]), int(piece.lengths[0])
    return [
        view(address + at, min(LARGE_STEP, length - at), 1).view(np.uint8).data for at in range(0, length, LARGE_STEP)
    ]
