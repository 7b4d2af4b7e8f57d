"""A blocking, thread-safe client of one server: the whole call in a few system calls, no event loop.

Each call borrows a connection (newest first), sends, and waits for its reply; concurrent callers get connections of
their own, so nothing is demultiplexed.  Every call ends within the limit.  A server found down is *marked* down:
calls then fail at once until a background probe has reached it again.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TypeVar, cast

import msgspec

from mooncake.errors import ErrorCode, StoreError, TimedOut, Unavailable
from mooncake.rpc import frame
from mooncake.rpc.messages import (
    DECODERS,
    KINDS,
    PROTOCOL,
    REPLY_OF,
    Failure,
    Hello,
    Message,
    Welcome,
    encode,
)
from mooncake.version import __version__

Reply = TypeVar("Reply", bound=Message)

CONNECT_LIMIT = 0.5  # seconds
PROBE_INTERVAL = 0.1  # seconds between two attempts of the background probe
_RECEIVE = 256 << 10
_MAX_IDLE = 16


def parse_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port".  Raises ValueError with a sentence."""
    host, colon, port = address.strip().rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536 or not host:
        raise ValueError(f"{address!r} is not an address; expected host:port")
    return host.strip("[]"), int(port)


def set_time_limit(sock: socket.socket, seconds: float) -> None:
    """Kernel-side limits on a blocking socket: cheaper than Python's, which poll before each call."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def connect(host: str, port: int, limit: float) -> socket.socket:
    """A blocking tcp connection without delays of small messages.  Raises OSError."""
    sock = socket.create_connection((host, port), timeout=limit)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class Connection:
    """One connection and its buffer; used by one thread at a time.

    `strays` are one-way messages that came while a reply was awaited.
    """

    __slots__ = ("_next_id", "_reader", "sock", "strays", "term")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.term = 0  # of the master that greeted us
        self.strays: list[frame.Frame] = []
        self._reader = frame.FrameReader()
        self._next_id = 1

    def call(self, message: Message, prefix: bytes = b"") -> Message:
        """Send `prefix` and `message`, wait for the reply.  Raises OSError (BlockingIOError: limit reached),
        StoreError if the server refused."""
        request_id = self._next_id
        self._next_id = request_id + 1 & 0xFFFFFFFF
        self.sock.sendall(prefix + frame.pack(KINDS[type(message)], frame.REQUEST, request_id, encode(message)))
        answer = None
        while answer is None:
            for got in self.receive():
                if got.request_id == request_id and got.flags & frame.REPLY:
                    answer = got
                elif got.flags & frame.ONE_WAY:
                    self.strays.append(got)
        if answer.flags & frame.FAILED:
            failure = cast(Failure, DECODERS[KINDS[Failure]].decode(answer.body))
            raise StoreError(ErrorCode(failure.code), failure.text)
        return DECODERS[KINDS[REPLY_OF[type(message)]]].decode(answer.body)

    def receive(self) -> list[frame.Frame]:
        """The frames that the next bytes complete.  Raises OSError."""
        data = self.sock.recv(_RECEIVE)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return self._reader.feed(data)

    def greet(self, hello: Hello) -> Welcome:
        """Say Hello.  Raises StoreError with a sentence when the two sides' protocols differ."""
        welcome = cast(Welcome, self.call(hello))
        if welcome.protocol != PROTOCOL:
            raise StoreError(
                ErrorCode.INVALID_VERSION,
                f"the master speaks protocol {welcome.protocol} (mooncake-py {welcome.version}), this side "
                f"{PROTOCOL} ({__version__}); install the same version on both",
            )
        self.term = welcome.term
        return welcome

    def close(self) -> None:
        self.sock.close()


class Client:
    """All of a process's calls to one master."""

    def __init__(self, address: str, hello: Hello, limit: float) -> None:
        self.address = address
        self._host, self._port = parse_address(address)
        self._hello = hello
        self._limit = limit
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._down = threading.Event()
        self._closed = False
        self._generation = 0
        self.welcome: Welcome | None = None
        self.on_one_way: Callable[[], bytes] = bytes  # what to send ahead of the next request

    @property
    def term(self) -> int:
        return self.welcome.term if self.welcome else 0

    @property
    def down(self) -> bool:
        return self._down.is_set()

    def call(self, message: Message, reply: type[Reply]) -> Reply:
        """The reply, of type `reply`.  Raises Unavailable, TimedOut or StoreError; each within the limit."""
        return self.call_from(message, reply)[0]

    def call_from(self, message: Message, reply: type[Reply]) -> tuple[Reply, int]:
        """As `call`, and the term of the master that answered."""
        if self._down.is_set():
            raise Unavailable(f"the master at {self.address} cannot be reached")
        for fresh in (False, True):
            connection, generation = self._borrow(fresh)
            try:
                answer = connection.call(message, self.on_one_way())
            except BlockingIOError:
                connection.close()
                self._mark_down()
                raise TimedOut(f"the master at {self.address} did not answer within {self._limit} s") from None
            except (OSError, frame.FramingError, msgspec.MsgspecError) as error:
                connection.close()
                if fresh:
                    self._mark_down()
                    raise Unavailable(f"the master at {self.address} cannot be reached: {error}") from None
                self._drop_idle()  # a restarted master closed them all: try once on a new one
                continue
            except BaseException as error:
                if isinstance(error, StoreError):
                    self._give_back(connection, generation)
                else:
                    connection.close()
                raise
            self._give_back(connection, generation)
            return cast(Reply, answer), connection.term
        raise AssertionError("unreachable")

    def send(self, data: bytes) -> None:
        """Send one-way frames now.  A server that is down makes this a no-op."""
        if self._down.is_set() or not data:
            return
        try:
            connection, generation = self._borrow(False)
        except StoreError:
            return
        try:
            connection.sock.sendall(data)
        except OSError:
            connection.close()
            return
        self._give_back(connection, generation)

    def close(self) -> None:
        self._closed = True
        self._drop_idle()

    # -- connections

    def _borrow(self, fresh: bool) -> tuple[Connection, int]:
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop(), self._generation
            generation = self._generation
        try:
            connection = self._open()
        except BlockingIOError:
            self._mark_down()
            raise TimedOut(f"the master at {self.address} did not answer within {self._limit} s") from None
        except (OSError, frame.FramingError, msgspec.MsgspecError) as error:
            self._mark_down()
            raise Unavailable(f"the master at {self.address} cannot be reached: {error}") from None
        return connection, generation

    def _open(self) -> Connection:
        connection = Connection(connect(self._host, self._port, min(CONNECT_LIMIT, self._limit)))
        try:
            set_time_limit(connection.sock, self._limit)
            welcome = connection.greet(self._hello)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if self.welcome is not None and welcome.term != self.welcome.term:
                self._generation += 1
            self.welcome = welcome
        return connection

    def _give_back(self, connection: Connection, generation: int) -> None:
        with self._lock:
            if not self._closed and generation == self._generation and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._generation += 1
        for connection in idle:
            connection.close()

    # -- a server that is down

    def _mark_down(self) -> None:
        with self._lock:
            if self._down.is_set() or self._closed:
                return
            self._down.set()
        self._drop_idle()
        threading.Thread(target=self._probe, name="mooncake-master-probe", daemon=True).start()

    def _probe(self) -> None:
        owner = os.getpid()
        while not self._closed and os.getpid() == owner:
            try:
                connection = self._open()
            except (OSError, StoreError, frame.FramingError, msgspec.MsgspecError):
                time.sleep(PROBE_INTERVAL)
                continue
            self._give_back(connection, self._generation)
            self._down.clear()
            return
