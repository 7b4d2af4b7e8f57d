"""A segment server whose engine is gone, and what it does until the next one takes it over: it serves the pool, and
answers on a socket on which only processes of its own user, that know the cluster's secret, may speak."""

import contextlib
import os
import socket
import time
from collections.abc import Callable

import msgspec

from mooncake.errors import ConfigError, ErrorCode, StoreError
from mooncake.rpc import frame
from mooncake.rpc.handshake import MOST_BYTES, Guard
from mooncake.rpc.message import Message
from mooncake.rpc.messages import DECODERS, PROTOCOL, Codes, Failure, Serving, Welcome, encode
from mooncake.rpc.segment_messages import LingerQuery, Lingers, TakeOver
from mooncake.rpc.serving_messages import Serve, Stop
from mooncake.security.secret import read_secret
from mooncake.segment.server import SegmentServer, logger
from mooncake.transfer.warm_sockets import listen, peer_of
from mooncake.version import __version__

MOST_VISITORS = 64
_DESCRIPTORS = 2  # that come with TakeOver: the engine's pidfd, and where messages for people go

Engine = Callable[[socket.socket, int, int], int]
"""Called with the next engine's channel, its pidfd, and how long (ms) to linger after it; its number as a writer.
Raises OSError if that is no pidfd."""


class Lingering:
    """From now on, until `end`.  `taken` is called when an engine takes the server over."""

    def __init__(self, server: SegmentServer, config: Serve, linger_ms: int, taken: Engine) -> None:
        """Raises OSError."""
        self._server = server
        self._config = config
        self._taken = taken
        self._ends_at = time.monotonic() + linger_ms / 1e3
        self._visitors: dict[_Visitor, None] = {}  # oldest first
        self._listener, self._path = listen(config.socket_dir, config.identity, config.segment)
        server.end_in(linger_ms / 1e3)
        server.leave_client()
        server.watch(self._listener.fileno(), self._accept)

    def end(self) -> None:
        """Nobody can take it over any more."""
        self._server.unwatch(self._listener.fileno())
        self._listener.close()
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        for visitor in list(self._visitors):
            self._drop(visitor)

    # -- visitors

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
            is_ours = peer_of(sock)[1] == os.geteuid()
            guard = Guard(read_secret())
        except (OSError, ConfigError) as error:
            logger.warning("a visitor of a lingering segment server is sent away: %s", error)
            return
        if not is_ours:
            sock.close()
            return
        sock.setblocking(False)
        if len(self._visitors) >= MOST_VISITORS:  # who knows what to say has said it long ago
            self._drop(next(iter(self._visitors)))
        visitor = _Visitor(sock, guard)
        self._visitors[visitor] = None
        self._server.watch(sock.fileno(), lambda: self._hear(visitor))

    def _hear(self, visitor: "_Visitor") -> None:
        if visitor not in self._visitors:
            return
        try:
            for got in visitor.receive():
                self._answer(visitor, got)
                if visitor not in self._visitors:
                    return
        except BlockingIOError:
            return
        except (OSError, EOFError, frame.FramingError, msgspec.MsgspecError):
            self._drop(visitor)

    def _answer(self, visitor: "_Visitor", got: frame.Frame) -> None:
        message = DECODERS[got.kind].decode(got.body) if got.kind in DECODERS else Codes([])
        try:
            reply: Message | None = visitor.guard.answer(message, self._welcome)
        except StoreError as error:
            visitor.send(got, Failure(int(error.code), str(error)), frame.FAILED)
            self._drop(visitor)
            return
        if reply is None and isinstance(message, TakeOver):
            self._take_over(visitor, got, message)
            return
        if reply is None and isinstance(message, LingerQuery):
            left = max(0.0, self._ends_at - time.monotonic())
            reply = Lingers(self._server.info.name, self._server.info.size, int(left * 1e3), os.getpid())
        if reply is None and isinstance(message, Stop):
            self._server.unmount()
            reply = Codes([0])
            self._server.stop()
        visitor.send(got, reply or Codes([int(ErrorCode.INVALID_PARAMS)]))

    def _take_over(self, visitor: "_Visitor", got: frame.Frame, message: TakeOver) -> None:
        if message.identity != self._config.identity or len(visitor.descriptors) != _DESCRIPTORS:
            visitor.send(got, Failure(int(ErrorCode.INVALID_PARAMS), "other settings are served here"), frame.FAILED)
            self._drop(visitor)
            return
        self._server.unwatch(visitor.sock.fileno())
        del self._visitors[visitor]
        pidfd, messages = visitor.descriptors
        try:
            writer = self._taken(visitor.sock, pidfd, message.linger_ms)
        except OSError:
            os.close(messages)
            visitor.sock.close()
            return
        for standard in (1, 2):
            os.dup2(messages, standard)
        os.close(messages)
        answer = frame.pack(got.kind, frame.REPLY, got.request_id, encode(Serving(self._server.info, writer)))
        with contextlib.suppress(OSError):  # it is gone already, as its channel will say
            socket.send_fds(visitor.sock, [answer], self._server.descriptors)

    def _drop(self, visitor: "_Visitor") -> None:
        if visitor in self._visitors:
            del self._visitors[visitor]
            self._server.unwatch(visitor.sock.fileno())
            visitor.close()

    def _welcome(self) -> Welcome:
        return Welcome(PROTOCOL, __version__, 0, 0, self._server.info.segment)


class _Visitor:
    """One connection, and the descriptors that came on it."""

    def __init__(self, sock: socket.socket, guard: Guard) -> None:
        self.sock = sock
        self.guard = guard
        self.descriptors: list[int] = []
        self._reader = frame.FrameReader(MOST_BYTES)

    def receive(self) -> list[frame.Frame]:
        """What has come.  Raises OSError, EOFError at its end, FramingError."""
        data, descriptors, _, _ = socket.recv_fds(self.sock, 65536, _DESCRIPTORS)
        self.descriptors += descriptors
        if not data:
            raise EOFError
        if len(self.descriptors) > _DESCRIPTORS:
            raise frame.FramingError("more descriptors than any message has")
        return self._reader.feed(data)

    def send(self, got: frame.Frame, message: Message, flags: int = 0) -> None:
        """The reply to `got`.  Raises OSError."""
        self.sock.send(frame.pack(got.kind, frame.REPLY | flags, got.request_id, encode(message)))

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.sock.close()
