"""Other hosts, or forced: the segment's server moves the bytes for us over pooled streams.

A batch is one request and one acknowledgement.  Crooked batches of small pieces pass through a staging buffer (gather,
then one large send; one large receive, then scatter), large pieces go straight from and to their place.
"""

import errno
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np

from mooncake.errors import ErrorCode, StoreError, TransferError
from mooncake.rpc import frame
from mooncake.rpc.client import Connection, connect, parse_address, set_time_limit
from mooncake.rpc.messages import DECODERS, KINDS, Codes, Failure, Hello, Message, Read, SegmentInfo, Write, WriteRecord
from mooncake.rpc.messages import encode as encode_message
from mooncake.transfer.base import Transport, merge
from mooncake.transfer.pieces import Pieces, gather, read_file, scatter, view, write_file
from mooncake.transfer.stream import receive, send, tune

STALL_LIMIT = 5.0  # seconds without a byte: the peer is given up
CONNECT_LIMIT = 2.0
REFUSE_FOR = 1.0  # after a failed connection, calls to that peer fail at once for so long (or as long as it took)
STAGING = 4 << 20
DIRECT = 512 << 10  # pieces of this size and more are not staged
MAX_STREAMS = 8  # idle streams kept for a peer
_Result = TypeVar("_Result")
_BROKEN = (OSError, EOFError, frame.FramingError, msgspec.MsgspecError)


class TcpTransport(Transport):
    """Streams to the server of one segment."""

    name = "tcp"

    def __init__(self, info: SegmentInfo, hello: Hello, limit: float) -> None:
        self._segment = info.segment
        self._endpoint = info.tcp
        self._address = parse_address(info.tcp)
        self._hello = hello
        self._limit = limit
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._refused_until = 0.0
        self._closed = False

    def put(self, term: int, records: list[WriteRecord], pieces: Pieces, trusted: bool) -> list[int]:
        message = Write(self._segment, term, records)
        return self._exchange(lambda stream: self._put(stream, message, pieces, trusted))

    def get(self, ranges: list[int], pieces: Pieces, trusted: bool) -> None:
        message = Read(self._segment, merge(ranges))
        code = self._exchange(lambda stream: self._get(stream, message, pieces, trusted))
        if code:
            raise TransferError(f"{self._endpoint} does not serve that segment any more ({ErrorCode(code).name})")

    @property
    def refusing(self) -> bool:
        """Whether the peer is known to be out of reach now."""
        return time.monotonic() < self._refused_until

    def close(self) -> None:
        self._closed = True
        self._drop_idle()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def _refuse(self, seconds: float) -> None:
        """Calls fail at once for so long; the idle streams would only stall as well."""
        self._refused_until = time.monotonic() + seconds
        self._drop_idle()

    # -- one exchange

    def _put(self, stream: Connection, message: Write, pieces: Pieces, trusted: bool) -> list[int]:
        _send(stream.sock, message)
        for step in _steps(pieces):
            chunk = _chunk(pieces, step)
            if len(chunk.addresses) == 1:
                send(stream.sock, _memory(int(chunk.addresses[0]), int(chunk.lengths[0])))
                continue
            send(stream.sock, _staging().fill(chunk, trusted))
        return _reply(stream.sock).codes

    def _get(self, stream: Connection, message: Read, pieces: Pieces, trusted: bool) -> int:
        sock = stream.sock
        _send(sock, message)
        code = _reply(sock).codes[0]
        if code:
            return code
        for step in _steps(pieces):
            chunk = _chunk(pieces, step)
            if len(chunk.addresses) == 1:
                receive(sock, _memory(int(chunk.addresses[0]), int(chunk.lengths[0])))
                continue
            staging = _staging()
            receive(sock, staging.memory[: chunk.total])
            staging.empty(chunk, trusted)
        return 0

    def _exchange(self, action: Callable[[Connection], _Result]) -> _Result:
        """Run one request on a stream.  A stream that had been idle may be dead: then once more on a new one."""
        started = time.monotonic()
        for fresh in (False, True):
            stream = self._borrow(fresh)
            set_time_limit(stream.sock, min(STALL_LIMIT, self._limit))
            try:
                result = action(stream)
            except BlockingIOError:
                stream.close()
                self._refuse(REFUSE_FOR)
                raise TransferError(f"{self._endpoint} has stalled for {STALL_LIMIT:.0f} s") from None
            except _BROKEN as error:
                stream.close()
                if isinstance(error, OSError) and error.errno == errno.EFAULT:
                    raise TransferError("the memory given is not mapped, or not with the needed rights") from None
                if fresh or time.monotonic() - started > STALL_LIMIT:
                    raise TransferError(f"the stream to {self._endpoint} broke: {error}") from None
                self._drop_idle()
                continue
            except BaseException:
                stream.close()
                raise
            with self._lock:
                if not self._closed and len(self._idle) < MAX_STREAMS:
                    self._idle.append(stream)
                    return result
            stream.close()
            return result
        raise AssertionError("unreachable")

    def _borrow(self, fresh: bool) -> Connection:
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop()
            if time.monotonic() < self._refused_until:
                raise TransferError(f"{self._endpoint} could not be reached a moment ago")
        started = time.monotonic()
        try:
            stream = Connection(connect(*self._address, CONNECT_LIMIT))
            tune(stream.sock)
            set_time_limit(stream.sock, CONNECT_LIMIT)
            stream.greet(self._hello)
        except (*_BROKEN, StoreError) as error:
            self._refuse(max(REFUSE_FOR, time.monotonic() - started))
            raise TransferError(f"cannot reach {self._endpoint}: {error}") from None
        return stream


class _Staging:
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
    staging: _Staging | None = None


_local = _Local()


def _staging() -> _Staging:
    if _local.staging is None:
        _local.staging = _Staging()
    return _local.staging


def _steps(pieces: Pieces) -> list[tuple[int, int]]:
    """Cut pieces into chunks [first, last): single large pieces, or runs of small ones that fit the staging buffer."""
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


def _chunk(pieces: Pieces, step: tuple[int, int]) -> Pieces:
    return Pieces(pieces.addresses[step[0] : step[1]], pieces.lengths[step[0] : step[1]])


def _memory(address: int, length: int) -> memoryview:
    return view(address, length, 1).view(np.uint8).data


def _send(sock: socket.socket, message: Message) -> None:
    sock.sendall(frame.pack(KINDS[type(message)], frame.REQUEST, 0, encode_message(message)))


def _reply(sock: socket.socket) -> Codes:
    header = bytearray(frame.HEADER_SIZE)
    receive(sock, memoryview(header))
    length, _, flags, _ = frame.HEADER.unpack(header)
    if length > frame.MAX_BODY:
        raise frame.FramingError(f"a reply of {length} bytes")
    body = bytearray(length)
    receive(sock, memoryview(body))
    if flags & frame.FAILED:
        failure = DECODERS[KINDS[Failure]].decode(body)
        assert isinstance(failure, Failure)
        raise TransferError(failure.text)
    codes = DECODERS[KINDS[Codes]].decode(body)
    assert isinstance(codes, Codes)
    return codes
