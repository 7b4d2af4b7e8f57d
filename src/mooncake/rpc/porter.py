"""A thread at the door of a server with a secret or TLS: streams are handed in once they have proved themselves.

It never waits for one of them, so a stranger that says nothing, or half a word, holds up nobody.
"""

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from mooncake.errors import ConfigError, ErrorCode, StoreError
from mooncake.rpc import frame
from mooncake.rpc.handshake import MOST_BYTES, Guard
from mooncake.rpc.messages import DECODERS, Failure, Welcome, encode
from mooncake.rpc.sockets import is_tls
from mooncake.security.anteroom import LIMIT, Anteroom
from mooncake.security.secret import Secret
from mooncake.security.tls_files import CLIENT_HELLO, EXPECTED, check_files, speaks_tls

_SWEEP = 0.5  # seconds between two looks for those that have waited too long
_STRANGE = (OSError, EOFError, StoreError, ConfigError, frame.FramingError, msgspec.MsgspecError)


class _Visitor:
    """`knocks`: TLS is spoken here, and this one has said nothing yet.  `shakes`: the TLS handshake goes on."""

    def __init__(self, stream: socket.socket, secret: Secret | None) -> None:
        self.stream = stream
        self.guard = Guard(secret)
        self.knocks = speaks_tls()
        self.shakes = self.is_plain = False
        self.reader = frame.FrameReader(MOST_BYTES)
        self.until = time.monotonic() + LIMIT
        self.ticket = 0

    @property
    def may_enter(self) -> bool:
        return self.guard.is_open and not (self.knocks or self.shakes or self.is_plain)


def porter_for(
    secret: Secret | None,
    welcome: Callable[[], Welcome],
    admitted: Callable[[socket.socket], None],
    refused: Callable[[], None] = lambda: None,
) -> "Porter | None":
    """For a tcp port; None where whoever comes may come in.  Raises ConfigError for files of TLS that are wrong."""
    check_files()
    if secret is None and not speaks_tls():
        return None
    return Porter(secret, welcome, admitted, refused)


class Porter:
    """`admitted` gets each stream, blocking again, in the porter's thread; `refused` each that is closed instead."""

    def __init__(
        self,
        secret: Secret | None,
        welcome: Callable[[], Welcome],
        admitted: Callable[[socket.socket], None],
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._secret, self._welcome, self._admitted, self._refused = secret, welcome, admitted, refused
        self._anteroom = Anteroom()
        self._selector = selectors.DefaultSelector()
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._new: list[_Visitor] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="mooncake-porter", daemon=True)
        self._thread.start()

    def take(self, stream: socket.socket) -> None:
        """A stream that was just accepted."""
        visitor = _Visitor(stream, self._secret)
        with self._lock:
            if not self._stopped:
                self._new.append(visitor)
                os.write(self._wake_write, b"x")
                return
        stream.close()
        self._refused()

    def stop(self) -> None:
        """End the thread; streams that have not proved themselves are closed."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            os.write(self._wake_write, b"x")

    def abandon(self) -> None:
        """Close every descriptor of ours, nothing else: after a fork, in the child."""
        self._stopped = True
        self._selector.close()
        for visitor in [*self._visitors.values(), *self._new]:
            visitor.stream.close()
        for fd in (self._wake_read, self._wake_write):
            with contextlib.suppress(OSError):
                os.close(fd)

    def _run(self) -> None:
        swept = time.monotonic()
        while not self._stopped:
            for key, _ in self._selector.select(_SWEEP if self._visitors else None):
                if key.fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                else:
                    self._hear(key.data)
            with self._lock:
                new, self._new = self._new, []
            for visitor in new:
                self._let_in(visitor)
            now = time.monotonic()
            if now > swept + _SWEEP:
                swept = now
                for visitor in [one for one in self._visitors.values() if now > one.until]:
                    self._send_away(visitor)
        for visitor in [*self._visitors.values(), *self._new]:
            self._send_away(visitor)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _let_in(self, visitor: _Visitor) -> None:
        visitor.ticket = self._anteroom.enter(lambda: self._send_away(visitor))
        try:
            visitor.stream.setblocking(False)
            self._watch(visitor)
        except (OSError, ValueError, KeyError):
            self._send_away(visitor)

    def _watch(self, visitor: _Visitor) -> None:
        self._visitors[visitor.stream] = visitor
        self._selector.register(visitor.stream, selectors.EVENT_READ, visitor)

    def _hear(self, visitor: _Visitor) -> None:
        try:
            if visitor.knocks:
                self._open(visitor)
            if visitor.shakes and not self._shake(visitor):
                return
            if not visitor.may_enter:
                self._listen(visitor)
        except BlockingIOError:
            return
        except _STRANGE:
            self._send_away(visitor)
            return
        if visitor.may_enter:
            self._forget(visitor)
            visitor.stream.setblocking(True)
            self._admitted(visitor.stream)

    def _open(self, visitor: _Visitor) -> None:
        """Its first byte says whether it speaks TLS."""
        first = visitor.stream.recv(1, socket.MSG_PEEK)
        visitor.knocks = False
        if first != CLIENT_HELLO:
            visitor.is_plain = True
            return
        from mooncake.rpc.tls_socket import wrap_server

        self._leave(visitor)
        visitor.stream = wrap_server(visitor.stream)
        visitor.shakes = True
        self._watch(visitor)

    def _shake(self, visitor: _Visitor) -> bool:
        """Whether the handshake is through."""
        assert is_tls(visitor.stream)
        waits_for = visitor.stream.shake()
        self._selector.modify(visitor.stream, waits_for or selectors.EVENT_READ, visitor)
        visitor.shakes = bool(waits_for)
        return not visitor.shakes

    def _listen(self, visitor: _Visitor) -> None:
        """What it says, until there is nothing more or it may come in."""
        while True:
            data = visitor.stream.recv(MOST_BYTES)
            if not data:
                raise EOFError
            for got in visitor.reader.feed(data):
                self._answer(visitor, got)
            if visitor.may_enter or not is_tls(visitor.stream):
                return

    def _answer(self, visitor: _Visitor, got: frame.Frame) -> None:
        decoder = DECODERS.get(got.kind)
        if decoder is None:
            raise frame.FramingError(f"kind {got.kind} is not a message")
        try:
            if visitor.is_plain:
                raise StoreError(ErrorCode.ILLEGAL_CLIENT, EXPECTED)
            answer = visitor.guard.answer(decoder.decode(got.body), self._welcome)
        except StoreError as error:
            failure = encode(Failure(int(error.code), str(error)))
            visitor.stream.send(frame.pack(got.kind, frame.REPLY | frame.FAILED, got.request_id, failure))
            raise
        if answer is None:  # it sends requests behind its proof, without waiting for the answer
            raise EOFError
        visitor.stream.send(frame.pack(got.kind, frame.REPLY, got.request_id, encode(answer)))

    def _forget(self, visitor: _Visitor) -> None:
        self._anteroom.leave(visitor.ticket)
        self._leave(visitor)

    def _leave(self, visitor: _Visitor) -> None:
        self._visitors.pop(visitor.stream, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(visitor.stream)

    def _send_away(self, visitor: _Visitor) -> None:
        self._forget(visitor)
        visitor.stream.close()
        self._refused()
