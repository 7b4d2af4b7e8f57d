"""What both ends of a tcp data stream have in common: socket options and the sizes of their calls."""

import contextlib
import socket
import time
from math import inf

from mooncake.errors import TransferTimedOut

SEND_STEP = 512 << 10  # bytes a call: larger ones let the sender run out of the receiver's cache [measured]
RECEIVE_STEP = 8 << 20
TICK = 1.0  # seconds: the time limit of a system call, so that silence is noticed to the second
_AT_FIRST = 1 << 20  # bytes
STALL_LIMIT = 5.0  # seconds without a byte: the peer is given up


def tune(sock: socket.socket) -> None:
    """No delays of small messages; a peer that vanished is noticed within half a minute.

    Between two processes of one host nothing is lost and nothing needs pacing: Reno, which every kernel has and
    everybody may choose, is 1.2 to 1.7 times as fast there as BBR [measured].
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if sock.getpeername()[0] == sock.getsockname()[0]:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def send(sock: socket.socket, memory: memoryview, deadline: float = inf) -> None:
    """All of `memory`.  Raises OSError (BlockingIOError: no byte has gone for STALL_LIMIT, if TICK is its limit),
    TransferTimedOut at the deadline (monotonic)."""
    at, end, silent = 0, len(memory), 0.0
    while at < end:
        _check(deadline)
        try:
            at += sock.send(memory[at : at + SEND_STEP])
            silent = 0.0
        except BlockingIOError:
            silent += TICK
            if silent >= STALL_LIMIT:
                raise


def receive(sock: socket.socket, target: memoryview, deadline: float = inf) -> None:
    """Fill `target`.  Raises EOFError when the peer is gone, and as `send`."""
    at, end, silent = 0, len(target), 0.0
    while at < end:
        _check(deadline)
        try:
            got = sock.recv_into(target[at : at + RECEIVE_STEP], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            silent += TICK
            if silent >= STALL_LIMIT:
                raise
            continue
        if not got:
            raise EOFError("the peer closed the stream")
        at += got
        silent = 0.0


def receive_new(sock: socket.socket, length: int) -> bytearray:
    """The next `length` bytes.  Memory is taken as they come: who only announces them takes none.  Raises as
    `receive`."""
    data = bytearray(min(length, _AT_FIRST))
    receive(sock, memoryview(data))
    while (at := len(data)) < length:
        data += bytes(min(at, length - at))
        with memoryview(data) as whole, whole[at:] as rest:
            receive(sock, rest)
    return data


def _check(deadline: float) -> None:
    if deadline is not inf and time.monotonic() > deadline:
        raise TransferTimedOut("the transfer did not end within its time limit")
