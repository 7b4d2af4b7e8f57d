"""Pooled tcp streams to one peer: borrowed for one exchange, looked at before they are used again, replaced once."""

import errno
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar, cast

import msgspec

from mooncake.errors import StoreError, TransferError
from mooncake.rpc import frame
from mooncake.rpc.client import Connection
from mooncake.rpc.message import Message
from mooncake.rpc.messages import DECODERS, KINDS, REPLY_OF, Codes, Failure, Hello
from mooncake.rpc.messages import encode as encode_message
from mooncake.rpc.place import parse_address
from mooncake.rpc.sockets import connect, is_quiet, set_time_limit
from mooncake.transfer.stream import SEND_STEP, STALL_LIMIT, TICK, receive, receive_new, send, tune

CONNECT_LIMIT = 2.0
REFUSE_FOR = 1.0  # after a stall or a slow failure, calls to that peer fail at once for so long, or as long as it took
SLOW = 0.1  # a port that refuses does so at once, and may be open again at once
MAX_STREAMS = 16  # open to one peer; further callers wait for one
BROKEN = (OSError, EOFError, frame.FramingError, msgspec.MsgspecError)
_Result = TypeVar("_Result")
_REPLY_OF_KIND = {KINDS[request]: reply for request, reply in REPLY_OF.items()}


class UnreachedError(TransferError):
    """The peer is not there, and nothing has been asked of it: it may be sought elsewhere."""


class StreamPool:
    """All streams of this process to `endpoint` ("host:port").

    `one_life`: the peer's Welcome.term names the process, and what was begun with one must not be repeated with the
    one that took its place.  `term` is that of the peer that last greeted us.  `instance`: the only process that is
    meant (0: whoever listens there).
    """

    def __init__(self, endpoint: str, hello: Hello, limit: float, one_life: bool = False, instance: int = 0) -> None:
        self._one_life = one_life
        self._instance = instance
        self._endpoint = endpoint
        self._address = parse_address(endpoint)
        self._hello = hello
        self._limit = limit
        self._idle: list[Connection] = []
        self._open = 0
        self._free = threading.Condition()
        self._refused_until = 0.0
        self._closed = False
        self.term = 0

    def exchange(self, action: Callable[[Connection], _Result]) -> _Result:
        """Run one request on a stream; a stream that breaks is replaced once."""
        started = time.monotonic()
        former: int | None = None
        while True:
            try:
                stream = self._borrow(former is not None)
            except UnreachedError as error:
                if former is None:
                    raise
                raise TransferError(str(error)) from error
            try:
                if self._one_life and former is not None and stream.term != former:
                    raise TransferError(f"{self._endpoint} was restarted in the middle of a transfer")
                result = action(stream)
            except BlockingIOError:
                self._discard(stream)
                self._refuse(REFUSE_FOR)
                raise TransferError(f"{self._endpoint} has stalled for {STALL_LIMIT:.0f} s") from None
            except BROKEN as error:
                self._discard(stream)
                if isinstance(error, OSError) and error.errno == errno.EFAULT:
                    raise TransferError("the memory given is not mapped, or not with the needed rights") from None
                if former is not None or time.monotonic() - started > STALL_LIMIT:
                    raise TransferError(f"the stream to {self._endpoint} broke: {error}") from None
                former = stream.term
                self.drop_idle()
                continue
            except BaseException:
                self._discard(stream)
                raise
            self._give_back(stream)
            return result

    def greet(self) -> None:
        """Make a new stream, keep it.  Raises TransferError whose cause is the OSError or StoreError."""
        self._give_back(self._borrow(True))

    @property
    def unused(self) -> bool:
        """Whether nothing is open to a living peer, and no failure need be remembered any more."""
        with self._free:
            dead = [stream for stream in self._idle if not is_quiet(stream.sock)]
            self._idle = [stream for stream in self._idle if stream not in dead]
        for stream in dead:
            self._discard(stream)
        return self._open == 0 and not self.refusing

    @property
    def refusing(self) -> bool:
        """Whether the peer is known to be out of reach now."""
        return time.monotonic() < self._refused_until

    def drop_idle(self) -> None:
        with self._free:
            idle, self._idle = self._idle, []
        for stream in idle:
            self._discard(stream)

    def close(self) -> None:
        self._closed = True
        self.drop_idle()

    # -- streams

    def _borrow(self, fresh: bool) -> Connection:
        give_up = time.monotonic() + self._limit
        while True:
            with self._free:
                while not self._idle and self._open >= MAX_STREAMS:
                    if not self._free.wait(give_up - time.monotonic()):
                        raise TransferError(f"all {MAX_STREAMS} streams to {self._endpoint} are in use")
                if not self._idle or fresh:
                    if self.refusing:
                        raise UnreachedError(f"{self._endpoint} could not be reached a moment ago")
                    self._open += 1
                    break
                stream = self._idle.pop()
            if is_quiet(stream.sock):
                return stream
            self._discard(stream)
        try:
            return self._connect()
        except BaseException:
            self._closed_one()
            raise

    def _connect(self) -> Connection:
        started = time.monotonic()
        try:
            stream = Connection(connect(*self._address, CONNECT_LIMIT))
        except OSError as error:
            self._remember(started)
            raise UnreachedError(f"cannot reach {self._endpoint}: {error}") from error
        try:
            tune(stream.sock)
            set_time_limit(stream.sock, CONNECT_LIMIT)
            welcome = stream.greet(self._hello)
            if self._instance and welcome.instance != self._instance:
                raise UnreachedError(f"another process listens at {self._endpoint} by now")
            self.term = welcome.term
            set_time_limit(stream.sock, TICK)
        except UnreachedError:
            stream.close()
            raise
        except (*BROKEN, StoreError) as error:
            stream.close()
            self._remember(started)
            raise UnreachedError(f"cannot reach {self._endpoint}: {error}") from error
        except BaseException:
            stream.close()
            raise
        return stream

    def _remember(self, started: float) -> None:
        """A connection begun then has failed."""
        took = time.monotonic() - started
        if took > SLOW:
            self._refuse(max(REFUSE_FOR, took))

    def _refuse(self, seconds: float) -> None:
        """Calls fail at once for so long; the idle streams would only stall as well."""
        self._refused_until = time.monotonic() + seconds
        self.drop_idle()

    def _give_back(self, stream: Connection) -> None:
        with self._free:
            if not self._closed and len(self._idle) < MAX_STREAMS:
                self._idle.append(stream)
                self._free.notify()
                return
        self._discard(stream)

    def _discard(self, stream: Connection) -> None:
        stream.close()
        self._closed_one()

    def _closed_one(self) -> None:
        with self._free:
            self._open -= 1
            self._free.notify()


def send_message(sock: socket.socket, message: Message, more: bool = False) -> None:
    """A request; `more`: its bytes follow at once."""
    data = memoryview(frame.pack(KINDS[type(message)], frame.REQUEST, 0, encode_message(message)))
    if more and len(data) < SEND_STEP:
        data = data[sock.send(data, socket.MSG_MORE) :]
    send(sock, data)


def receive_codes(sock: socket.socket) -> Codes:
    """As `receive_reply`, of a reply that is Codes."""
    return cast(Codes, receive_reply(sock))


def receive_reply(sock: socket.socket) -> Message:
    """One reply and no byte more: data may follow it.  Raises TransferError with the peer's words if it refused."""
    header = bytearray(frame.HEADER_SIZE)
    receive(sock, memoryview(header))
    length, kind, flags, _ = frame.HEADER.unpack(header)
    if length > frame.MAX_BODY:
        raise frame.FramingError(f"a reply of {length} bytes")
    body = receive_new(sock, length)
    if flags & frame.FAILED:
        failure = DECODERS[KINDS[Failure]].decode(body)
        assert isinstance(failure, Failure)
        raise TransferError(failure.text)
    reply = _REPLY_OF_KIND.get(kind)
    if reply is None:
        raise frame.FramingError(f"a reply of kind {kind}")
    return DECODERS[KINDS[reply]].decode(body)
