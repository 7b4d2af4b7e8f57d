"""A blocking, thread-safe client of one server: the whole call in a few system calls, no event loop.

Each call borrows a connection (newest first), sends, and waits for its reply; concurrent callers get connections of
their own, so nothing is demultiplexed.  Every call ends within the limit.  A server found down is *marked* down:
calls then fail at once until a background probe has reached it again, wherever it is by then.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import msgspec

from mooncake.errors import ConfigError, ErrorCode, StoreError, TimedOut, Unavailable
from mooncake.rpc import frame, handshake
from mooncake.rpc.message import Message
from mooncake.rpc.messages import DECODERS, KINDS, REPLY_OF, SEGMENT, Failure, Hello, PutStart, Welcome, encode
from mooncake.rpc.place import MasterPlace
from mooncake.rpc.sockets import connect, send_soon, set_time_limit
from mooncake.security.credential import read_credential

Reply = TypeVar("Reply", bound=Message)

CONNECT_LIMIT = 0.5  # seconds
PROBE_INTERVAL = 0.1  # seconds between two attempts of the background probe
_RECEIVE = 256 << 10
_MAX_IDLE = 16
_BROKEN = (OSError, frame.FramingError, msgspec.MsgspecError)


class Connection:
    """One connection and its buffer; used by one thread at a time.

    `strays` are one-way messages that came while a reply was awaited.
    """

    __slots__ = ("_next_id", "_reader", "posted", "sock", "strays", "term")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.term = 0  # of the master that greeted us
        self.strays: list[frame.Frame] = []
        self.posted: dict[int, Message] = {}  # requests whose replies nobody waits for, by id
        self._reader = frame.FrameReader()
        self._next_id = 1

    def call(self, message: Message, prefix: bytes = b"") -> Message:
        """Send `prefix` and `message`, wait for the reply.  Raises as `reply_to`."""
        return self.reply_to(message, self.send(message, prefix))

    def reply_to(self, message: Message, request_id: int) -> Message:
        """Wait for the reply to what was sent.  Raises OSError (BlockingIOError: limit reached), StoreError if the
        server refused."""
        while True:
            answer = self._receive_until(request_id)
            if answer is not None:
                break
        if answer.flags & frame.FAILED:
            raise _refused(answer)
        return DECODERS[KINDS[REPLY_OF[type(message)]]].decode(answer.body)

    def post(self, message: Message) -> None:
        """Send a request without waiting for its reply.  Raises OSError."""
        self.posted[self.send(message, b"")] = message

    def settle(self) -> None:
        """Wait for the replies of everything posted.  Raises OSError."""
        while self.posted:
            self._receive_until(-1)

    def call_each(self, messages: Iterable[Message], ahead: int) -> None:
        """Send all, with up to `ahead` of them unanswered; the replies are of no interest.  Raises as `reply_to`."""
        unanswered: set[int] = set()
        for message in messages:
            unanswered.add(self.send(message, b""))
            while len(unanswered) >= ahead:
                self._take_replies(unanswered)
        while unanswered:
            self._take_replies(unanswered)

    def _take_replies(self, unanswered: set[int]) -> None:
        for got in self.receive():
            if got.flags & frame.ONE_WAY:
                self.strays.append(got)
                continue
            unanswered.discard(got.request_id)
            if got.flags & frame.FAILED:
                raise _refused(got)

    def send(self, message: Message, prefix: bytes) -> int:
        """The request's id.  Raises OSError."""
        request_id = self._next_id
        self._next_id = request_id + 1 & 0xFFFFFFFF
        send_soon(self.sock, prefix + frame.pack(KINDS[type(message)], frame.REQUEST, request_id, encode(message)))
        return request_id

    def _receive_until(self, request_id: int) -> frame.Frame | None:
        """What comes next; the reply to `request_id` if it is among it."""
        answer = None
        for got in self.receive():
            if got.flags & frame.ONE_WAY:
                self.strays.append(got)
            elif got.request_id == request_id:
                answer = got
            else:
                self.posted.pop(got.request_id, None)
        return answer

    def receive(self) -> list[frame.Frame]:
        """The frames that the next bytes complete.  Raises OSError."""
        data = self.sock.recv(_RECEIVE)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return self._reader.feed(data)

    def greet(self, hello: Hello) -> Welcome:
        """Say Hello, and prove the cluster's secret.  Raises OSError, StoreError with a sentence when the two sides do
        not go together."""
        return self._greeted(handshake.greet(self, hello))

    def greet_as_tenant(self, hello: Hello) -> Welcome:
        """As `greet`, a master, and prove the tenant's credential if there is one.  (Nobody else gets a proof of it: he
        could hand it on to the master as his own.)"""
        try:
            credential = read_credential()
        except ConfigError as error:
            raise StoreError(ErrorCode.ILLEGAL_CLIENT, str(error)) from None
        return self._greeted(handshake.greet(self, handshake.of_tenant(hello, credential), credential))

    def _greeted(self, welcome: Welcome) -> Welcome:
        self.term = welcome.term
        return welcome

    def greet_master(self, hello: Hello, place: MasterPlace) -> Welcome:
        """As `greet`, what should be the master found at `place`, a client as its tenant; OSError too if it is none
        now."""
        try:
            welcome = self.greet(hello) if hello.role == SEGMENT else self.greet_as_tenant(hello)
        except StoreError as error:
            if error.code != ErrorCode.UNAVAILABLE_IN_CURRENT_STATUS:
                raise
            raise ConnectionRefusedError(str(error)) from None  # a standby: it says who leads
        place.accept(welcome.term)
        return welcome

    def close(self) -> None:
        self.sock.close()


def _refused(answer: frame.Frame) -> StoreError:
    failure = cast(Failure, DECODERS[KINDS[Failure]].decode(answer.body))
    return StoreError(ErrorCode(failure.code), failure.text)


class Client:
    """All of a process's calls to one master, or to whoever is the master."""

    def __init__(self, place: MasterPlace, hello: Hello, limit: float) -> None:
        self.address = place.text
        self._place = place
        self._hello = hello
        self._limit = limit
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._down = threading.Event()
        self._closed = False
        self._generation = 0
        self._unanswered: list[Message] = []
        self.welcome: Welcome | None = None
        self.on_one_way: Callable[[], bytes] = bytes  # what to send ahead of the next request
        self.on_call: Callable[[str, float], None] = lambda name, seconds: None  # told of every call that has ended

    @property
    def term(self) -> int:
        return self.welcome.term if self.welcome else 0

    @property
    def down(self) -> bool:
        return self._down.is_set()

    def call(self, message: Message, reply: type[Reply]) -> Reply:
        """The reply, of type `reply`.  Raises Unavailable, TimedOut or StoreError; each within the limit.

        A pooled connection may be dead because the master was restarted: then the call goes once more on a new one.
        A PutStart only if it is indeed another master: the old one may have granted it already.
        """
        return cast(Reply, self._timed_call(message, None, time.monotonic()))

    def call_first(self, message: Message, reply: type[Reply]) -> Reply:
        """As `call`, of a process that begins: where masters elect their leader it waits until there is one."""
        end = time.monotonic() + self._place.wait_s
        first: StoreError | None = None  # says why; later ones may only say that it is still so
        while True:
            try:
                return self.call(message, reply)
            except (Unavailable, TimedOut) as error:
                first = first or error
                if time.monotonic() >= end:
                    raise first from None
            time.sleep(PROBE_INTERVAL)

    def begin(self, message: Message, reply: type[Reply]) -> Callable[[], Reply]:
        """Send a request; what is returned waits for its reply, as `call`.  Raises as `call`."""
        if self._down.is_set():
            raise Unavailable(f"the master at {self.address} cannot be reached")
        started = time.monotonic()
        connection, generation = self._borrow(False)
        try:
            sent = connection, generation, connection.send(message, self.on_one_way())
        except OSError:
            self._discard(connection)
            self._drop_idle()
            return lambda: self._timed_call(message, None, started)
        return lambda: self._timed_call(message, sent, started)

    def _timed_call(self, message: Message, sent: tuple[Connection, int, int] | None, started: float) -> Any:
        try:
            return self._call(message, sent)
        finally:
            self.on_call(type(message).__name__, time.monotonic() - started)

    def _call(self, message: Message, sent: tuple[Connection, int, int] | None) -> Any:
        """`sent`: the first try has been begun: connection, its generation, the request's id."""
        if sent is None and self._down.is_set():
            raise Unavailable(f"the master at {self.address} cannot be reached")
        former = 0
        for fresh in (False, True):
            begun = sent if not fresh else None
            connection, generation = self._borrow(fresh) if begun is None else begun[:2]
            if former and isinstance(message, PutStart) and connection.term == former:
                self._give_back(connection, generation)
                raise Unavailable(f"the connection to the master at {self.address} broke in the middle of a put")
            try:
                if begun is None:
                    answer = connection.call(message, self.on_one_way())
                else:
                    answer = connection.reply_to(message, begun[2])
            except BlockingIOError:
                self._discard(connection)
                self._mark_down()
                raise TimedOut(f"the master at {self.address} did not answer within {self._limit} s") from None
            except _BROKEN as error:
                former = connection.term
                self._discard(connection)
                if fresh:
                    self._mark_down()
                    raise Unavailable(f"the master at {self.address} cannot be reached: {error}") from None
                self._drop_idle()
                continue
            except BaseException as error:
                if isinstance(error, StoreError):
                    self._give_back(connection, generation)
                else:
                    self._discard(connection)
                raise
            self._give_back(connection, generation)
            return answer
        raise AssertionError("unreachable")

    def post(self, message: Message) -> None:
        """Send a request that cannot fail for a reason that matters, and do not wait for its reply; should the
        connection break before it has come, the request is sent again.  Raises Unavailable."""
        for fresh in (False, True):
            connection, generation = self._borrow(fresh)
            try:
                connection.post(message)
            except OSError as error:
                self._discard(connection)
                if fresh:
                    self._mark_down()
                    raise Unavailable(f"the master at {self.address} cannot be reached: {error}") from None
                self._drop_idle()
                continue
            self._give_back(connection, generation)
            return

    def send(self, data: bytes) -> None:
        """Send one-way frames now.  A server that is down makes this a no-op."""
        if self._down.is_set() or not data:
            return
        try:
            connection, generation = self._borrow(False)
        except StoreError:
            return
        try:
            send_soon(connection.sock, data)
        except OSError:
            self._discard(connection)
            return
        self._give_back(connection, generation)

    def close(self) -> None:
        """Wait for what was posted, within the limit, then close every connection."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._closed = True
        end = time.monotonic() + self._limit
        for connection in idle:
            left = end - time.monotonic()
            if connection.posted and left > 0:
                with contextlib.suppress(*_BROKEN):
                    set_time_limit(connection.sock, max(left, 0.001))
                    connection.settle()
            connection.close()

    # -- connections

    def _borrow(self, fresh: bool) -> tuple[Connection, int]:
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop(), self._generation
            generation = self._generation
        try:
            connection = self._open()
            self._repost(connection)
        except BlockingIOError:
            self._mark_down()
            raise TimedOut(f"the master at {self.address} did not answer within {self._limit} s") from None
        except _BROKEN as error:
            self._mark_down()
            raise Unavailable(self._place.unreachable(error)) from None
        return connection, generation

    def _repost(self, connection: Connection) -> None:
        """Send again what was posted on connections that have broken since."""
        with self._lock:
            unanswered, self._unanswered = self._unanswered, []
        for message in unanswered:
            connection.post(message)

    def _discard(self, connection: Connection) -> None:
        connection.close()
        if connection.posted:
            with self._lock:
                self._unanswered += connection.posted.values()

    def _open(self) -> Connection:
        connection = Connection(connect(*self._place.find(), min(CONNECT_LIMIT, self._limit)))
        try:
            set_time_limit(connection.sock, self._limit)
            welcome = connection.greet_master(self._hello, self._place)
        except BaseException:
            connection.close()
            raise
        former: list[Connection] = []
        with self._lock:
            if self.welcome is not None and welcome.term != self.welcome.term:
                self._generation += 1
                former, self._idle = self._idle, []
            self.welcome = welcome
        for other in former:  # to a master that was followed by this one
            self._discard(other)
        return connection

    def _give_back(self, connection: Connection, generation: int) -> None:
        with self._lock:
            if not self._closed and generation == self._generation and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        self._discard(connection)

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._generation += 1
        for connection in idle:
            self._discard(connection)

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
                self._repost(connection)
            except (*_BROKEN, StoreError):
                time.sleep(PROBE_INTERVAL)
                continue
            self._give_back(connection, self._generation)
            self._down.clear()
            return
