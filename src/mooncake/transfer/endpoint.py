"""The side of an engine that others ask: its port, and the few threads that serve it.

All threads sleep in one epoll; who wakes up serves that one stream's request with blocking calls, then puts it back.
So idle streams cost no thread, and nothing is handed over from one thread to another.  Only tcp transfers need them:
what processes of the same host copy passes this process by.
"""

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec
import numpy as np

from mooncake.errors import ErrorCode, TransferError
from mooncake.rpc import frame
from mooncake.rpc.engine_messages import (
    EAGER_SIZE,
    EngineExported,
    EngineExports,
    EngineNotify,
    EngineOpen,
    EngineOpened,
    EngineRead,
    EngineWrite,
)
from mooncake.rpc.message import Message
from mooncake.rpc.messages import DECODERS, KINDS, PROTOCOL, Codes, Failure, Hello, Ping, Welcome, encode
from mooncake.rpc.porter import porter_for
from mooncake.rpc.sockets import set_time_limit
from mooncake.security.secret import read_secret
from mooncake.transfer.cma import start_of
from mooncake.transfer.host import pid_namespace
from mooncake.transfer.pieces import Pieces
from mooncake.transfer.regions import Regions
from mooncake.transfer.staging import receive_pieces, send_pieces
from mooncake.transfer.stream import TICK, receive, receive_new, tune
from mooncake.version import __version__

logger = logging.getLogger("mooncake.engine")

FEWEST, MOST = 2, 16  # threads
SPARE_FOR = 10.0  # seconds until a thread beyond the fewest ends
MAX_STREAMS = 4096
MAX_NOTIFICATIONS = 65536
REMEMBERED = 1024  # numbers of notifications, to tell repeated ones
LINGER = 0.001  # seconds to wait for the next request before a stream goes back to the epoll
_ONCE = select.EPOLLIN | select.EPOLLONESHOT
_BROKEN = (OSError, EOFError, ValueError, TransferError, frame.FramingError, msgspec.MsgspecError)


class Endpoint:
    """Serves `listener` until `close`.  `instance` names this engine's life."""

    def __init__(self, listener: socket.socket, regions: Regions, instance: int, limit: float) -> None:
        self._listener = listener
        self._regions = regions
        self._instance = instance
        self._limit = limit
        self._me = (os.getpid(), start_of(os.getpid()), pid_namespace())
        self._epoll = select.epoll()
        self._streams: dict[int, socket.socket] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._threads = self._idle = 0
        self._closed = False
        self._wake_read, self._wake_write = os.pipe()
        self._notifications: deque[EngineNotify] = deque()
        self._numbers: OrderedDict[int, None] = OrderedDict()
        self.moved = 0  # bytes, by streams
        self._porter = porter_for(read_secret(), self._welcome, self._add_stream)
        listener.setblocking(False)
        self._epoll.register(self._wake_read, select.EPOLLIN)
        self._epoll.register(listener.fileno(), _ONCE)

    def start(self) -> None:
        for _ in range(FEWEST):
            self._add_thread()

    def watch(self, descriptor: int, action: Callable[[], None]) -> None:
        """Run `action` once, in one of our threads, when a pidfd's process ends.  It ends with the descriptor."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._watched[descriptor] = action
            self._epoll.register(descriptor, _ONCE)

    def notifications(self) -> list[EngineNotify]:
        """What has come since the last time."""
        with self._lock:
            taken = list(self._notifications)
            self._notifications.clear()
        return taken

    def close(self) -> None:
        """End every stream and thread (a thread that is serving: as soon as its call returns)."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            streams = list(self._streams.values())
        os.write(self._wake_write, b"x")
        self._listener.close()
        if self._porter is not None:
            self._porter.stop()
        for stream in streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        give_up = time.monotonic() + 1
        while self._threads and time.monotonic() < give_up and not self._is_one_of_ours():
            time.sleep(0.001)
        self._let_go()

    def abandon(self) -> None:
        """Close every descriptor of ours, nothing else: after a fork, in the child."""
        self._closed = True
        if self._porter is not None:
            self._porter.abandon()
        self._let_go()

    def _let_go(self) -> None:
        self._listener.close()
        for stream in self._streams.values():
            stream.close()
        self._epoll.close()
        for fd in (self._wake_read, self._wake_write):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._wake_read = self._wake_write = -1

    # -- threads

    def _add_thread(self) -> None:
        with self._lock:
            self._threads += 1
        threading.Thread(target=self._run, name="mooncake-engine", daemon=True).start()

    def _is_one_of_ours(self) -> bool:
        return threading.current_thread().name == "mooncake-engine"

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._idle += 1
                try:
                    events = [] if self._closed else self._epoll.poll(SPARE_FOR, 1)
                except (OSError, ValueError):  # closed
                    return
                finally:
                    with self._lock:
                        self._idle -= 1
                        busy = self._idle == 0 and self._threads < MOST
                        spare = self._threads > FEWEST and self._idle > 0
                if self._closed or (not events and spare):
                    return
                if events and busy:
                    self._add_thread()
                for descriptor, _ in events:
                    self._dispatch(descriptor)
        finally:
            with self._lock:
                self._threads -= 1

    def _dispatch(self, descriptor: int) -> None:
        if descriptor == self._listener.fileno():
            self._accept()
        elif descriptor in self._streams:
            self._serve(self._streams[descriptor])
        else:
            action = self._watched.pop(descriptor, None)
            if action is not None:
                action()

    def _accept(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            try:
                stream, _ = self._listener.accept()
            except BlockingIOError:  # that peer has gone already
                return
            except OSError as error:
                if not self._closed:
                    logger.warning("cannot take a stream now: %s", error)
                    time.sleep(0.1)
                return
            finally:
                self._epoll.modify(self._listener.fileno(), _ONCE)
            stream.setblocking(True)
            if self._porter is None:
                self._add_stream(stream)
            else:
                self._porter.take(stream)

    def _add_stream(self, stream: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the peer is gone already: the first read says so
            tune(stream)
        set_time_limit(stream, TICK)
        with self._lock:
            if self._closed or len(self._streams) >= MAX_STREAMS:
                stream.close()
                return
            self._streams[stream.fileno()] = stream
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            self._epoll.register(stream.fileno(), _ONCE)

    def _welcome(self) -> Welcome:
        return Welcome(PROTOCOL, __version__, self._instance, 0, self._instance)

    def _serve(self, stream: socket.socket) -> None:
        """Requests as long as they follow one another closely."""
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLIN)
        try:
            while True:
                self._answer(stream, *_receive(stream))
                if not poll.poll(LINGER * 1e3):
                    break
            self._epoll.modify(stream.fileno(), _ONCE)
        except _BROKEN as error:
            if not isinstance(error, EOFError):
                logger.debug("a stream ended: %s", error)
            with self._lock:
                self._streams.pop(stream.fileno(), None)
            stream.close()

    # -- requests

    def _answer(self, stream: socket.socket, request_id: int, message: Message) -> None:
        match message:
            case Hello():
                _reply(stream, request_id, message, self._welcome())
            case EngineRead():
                self._read(stream, request_id, message)
            case EngineWrite():
                self._write(stream, request_id, message)
            case EngineNotify():
                _reply(stream, request_id, message, Codes([self._take(message)]))
            case EngineOpen():
                _reply(stream, request_id, message, self._open(message))
            case EngineExports():
                _reply(stream, request_id, message, EngineExported(self._regions.exports.list(message.numbers)))
            case Ping():
                _reply(stream, request_id, message, Codes([0]))
            case _:
                failure = Failure(ErrorCode.INVALID_PARAMS, f"{type(message).__name__} is no request to an engine")
                _reply(stream, request_id, message, failure, frame.FAILED)

    def _read(self, stream: socket.socket, request_id: int, message: EngineRead) -> None:
        pieces = _pieces(message)
        with self._regions.use(pieces, stream) as registered:
            _reply(stream, request_id, message, Codes([0 if registered else ErrorCode.INVALID_READ]), more=registered)
            if registered:
                send_pieces(stream, pieces, False, self._deadline(pieces))
                self.moved += pieces.total

    def _write(self, stream: socket.socket, request_id: int, message: EngineWrite) -> None:
        pieces = _pieces(message)
        asked = pieces.total > EAGER_SIZE
        with self._regions.use(pieces, stream) as registered:
            refused = Codes([ErrorCode.INVALID_WRITE])
            if asked:
                _reply(stream, request_id, message, Codes([0]) if registered else refused)
            if registered:
                receive_pieces(stream, pieces, False, self._deadline(pieces))
                self.moved += pieces.total
            elif not asked:
                receive(stream, memoryview(bytearray(pieces.total)))
            if registered or not asked:
                _reply(stream, request_id, message, Codes([0]) if registered else refused)

    def _deadline(self, pieces: Pieces) -> float:
        return time.monotonic() + self._limit + pieces.total * 1e-9

    def _take(self, message: EngineNotify) -> int:
        with self._lock:
            if message.number in self._numbers:
                return 0
            if len(self._notifications) >= MAX_NOTIFICATIONS:
                return int(ErrorCode.BUFFER_OVERFLOW)
            self._numbers[message.number] = None
            if len(self._numbers) > REMEMBERED:
                self._numbers.popitem(last=False)
            self._notifications.append(message)
        return 0

    def _open(self, message: EngineOpen) -> EngineOpened:
        pid, start, namespace = self._me
        opened = EngineOpened(self._regions.first, pid, start, namespace)
        if message.pid and message.namespace == namespace:
            slot, token, pidfd = self._regions.admit(message.pid, message.start)
            if slot >= 0:
                self.watch(pidfd, lambda: self._regions.dismiss(slot, token))
                table = self._regions.table
                opened.table_fd, opened.table_address = table.fd, table.address
                opened.slot, opened.token = slot, token
        return opened


def _pieces(message: EngineRead | EngineWrite) -> Pieces:
    """Raises ValueError for what cannot be ranges of memory."""
    addresses, lengths = np.frombuffer(message.addresses, np.int64), np.frombuffer(message.lengths, np.int64)
    if len(addresses) != len(lengths) or not len(lengths) or min(lengths.min(), addresses.min()) <= 0:
        raise ValueError("these are no ranges of memory")
    return Pieces(addresses, lengths)


def _receive(stream: socket.socket) -> tuple[int, Message]:
    header = bytearray(frame.HEADER_SIZE)
    receive(stream, memoryview(header))
    length, kind, _, request_id = frame.HEADER.unpack(header)
    if length > frame.MAX_BODY or kind not in DECODERS:
        raise frame.FramingError(f"kind {kind} with {length} bytes is not a message")
    return request_id, DECODERS[kind].decode(receive_new(stream, length))


def _reply(
    stream: socket.socket, request_id: int, request: Message, message: Message, flags: int = 0, more: bool = False
) -> None:
    data = frame.pack(KINDS[type(request)], frame.REPLY | flags, request_id, encode(message))
    stream.sendall(data, socket.MSG_MORE if more else 0)
