"""Pieces to and from a tcp stream, the same for every data stream and for both of its ends.

Small pieces pass through a staging buffer (gather, then one large send; one large receive, then scatter); large ones
go straight from and to their place.  Memory not known to be mapped (`trusted` False) is only touched by the kernel,
or by its GPU if it is device memory; so with TLS it is always staged.
"""

import mmap
import os
import socket
import sys
import threading
from collections.abc import Iterator
from math import inf

import numpy as np

from mooncake.rpc.sockets import is_tls
from mooncake.transfer.checksums import Sums
from mooncake.transfer.cuda import driver
from mooncake.transfer.pieces import Pieces, view
from mooncake.transfer.room import Room
from mooncake.transfer.stream import receive, send

STAGING = 4 << 20
SUMMED_STEP = 4 << 20  # bytes that are hashed while they are sent, or while the next ones come
DIRECT = 512 << 10  # pieces of this size and more are not staged


def send_pieces(
    sock: socket.socket, pieces: Pieces, trusted: bool, deadline: float = inf, sums: Sums | None = None
) -> None:
    """All of `pieces`, in order.  Raises as `stream.send` (OSError EFAULT: bad memory)."""
    for chunk, direct in _chunks(pieces, trusted, is_tls(sock)):
        memory = _memory(chunk) if direct else staging().fill(chunk, trusted)
        if sums is None:
            send(sock, memory, deadline)
        else:
            _send_summed(sock, memory, deadline, sums, is_mapped=trusted or not direct)


def receive_pieces(
    sock: socket.socket, pieces: Pieces, trusted: bool, deadline: float = inf, sums: Sums | None = None
) -> None:
    """Fill `pieces`, in order.  Raises as `stream.receive` (OSError EFAULT: bad memory)."""
    for chunk, direct in _chunks(pieces, trusted, is_tls(sock)):
        memory = _memory(chunk) if direct else staging().memory[: chunk.total]
        if sums is None:
            receive(sock, memory, deadline)
            if not direct:
                staging().empty(chunk, trusted)
            continue
        try:
            for step in _cut(memory):
                receive(sock, step, deadline)
                sums.add_meanwhile(step)
            if not direct:
                staging().empty(chunk, trusted)
        finally:
            sums.wait()


def sum_pieces(pieces: Pieces, trusted: bool, sums: Sums) -> None:
    """Have `sums` taken of `pieces`, in order, wherever they are.  Raises TransferError for bad memory."""
    for chunk, direct in _chunks(pieces, trusted, False):
        if direct and trusted:
            sums.add(_memory(chunk))
            continue
        total = chunk.total
        for start in range(0, total, STAGING):
            sums.add(staging().fill(chunk.part(start, min(STAGING, total - start)), trusted))


def _send_summed(sock: socket.socket, memory: memoryview, deadline: float, sums: Sums, is_mapped: bool) -> None:
    """`memory`, which may be used again then.  Unless it is known to be mapped, the kernel reads it first."""
    try:
        for step in _cut(memory):
            if is_mapped:
                sums.add_meanwhile(step)
            send(sock, step, deadline)
            if not is_mapped:
                sums.add_meanwhile(step)
    finally:
        sums.wait()


def _cut(memory: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(memory), SUMMED_STEP):
        yield memory[at : at + SUMMED_STEP]


class Staging:
    """A thread's staging buffer: a memfd, so that the kernel can fill it from addresses that may be bad."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("mooncake-staging", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, STAGING)
        self._mapping = mmap.mmap(self.fd, STAGING)
        self.memory = memoryview(self._mapping)
        self._array = np.frombuffer(self._mapping, np.uint8)
        self.address = int(self._array.ctypes.data)
        self._room = Room(self.address, self.fd, STAGING)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._room.close()
            os.close(self.fd)

    def fill(self, pieces: Pieces, trusted: bool) -> memoryview:
        self._room.fill([0, pieces.total], pieces, trusted)
        return self.memory[: pieces.total]

    def empty(self, pieces: Pieces, trusted: bool) -> None:
        self._room.empty([0, pieces.total], pieces, trusted)


class _Local(threading.local):
    staging: Staging | None = None


_local = _Local()


def staging() -> Staging:
    """This thread's."""
    if _local.staging is None:
        _local.staging = Staging()
    return _local.staging


def _chunks(pieces: Pieces, trusted: bool, by_library: bool) -> Iterator[tuple[Pieces, bool]]:
    """Single large pieces, which go straight (True), or what fits the staging buffer.  `by_library`: the stream's own
    code would touch the memory, and end with it if it is bad."""
    may_be_device = not trusted and driver.is_loaded()
    is_shy = not trusted and by_library
    for first, end in _steps(pieces):
        chunk = Pieces(pieces.addresses[first:end], pieces.lengths[first:end])
        if end - first > 1:
            yield chunk, False
        elif is_shy or (may_be_device and driver.range_of(int(chunk.addresses[0]))):
            for start in range(0, chunk.total, STAGING):
                yield chunk.part(start, min(STAGING, chunk.total - start)), False
        else:
            yield chunk, True


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


def _memory(piece: Pieces) -> memoryview:
    """The memory of a single piece."""
    return view(int(piece.addresses[0]), int(piece.lengths[0]), 1).view(np.uint8).data
