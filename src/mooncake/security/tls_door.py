"""The door of a port that an asyncio loop serves, where TLS is spoken: who is not through yet is counted and bounded.

Each connection gets the certificate that is there when it comes.  One that begins with anything but TLS is told so in
its own words, by `refuse`, and closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from mooncake.errors import ConfigError
from mooncake.security.anteroom import LIMIT, Anteroom
from mooncake.security.tls import contexts
from mooncake.security.tls_files import CLIENT_HELLO

logger = logging.getLogger("mooncake.security")

_AT_ONCE = 32  # connections taken in one step of the loop
_PAUSE = 0.1  # seconds without accepting when no descriptor is left
_LARGEST_WORD = 4096  # bytes that are read of somebody who speaks something else
_QUIET_FOR = 1.0  # seconds between two lines in the log about strangers


class TlsDoor:
    """Serves `listeners` (which do not block) with protocols of `factory`, until `close`.

    `refuse`: what to answer to somebody who speaks something else, by his first bytes.  `public`: users need no
    certificate of the cluster.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        factory: Callable[[], asyncio.BaseProtocol],
        refuse: Callable[[bytes], bytes],
        public: bool = False,
    ) -> None:
        self.sockets = list(listeners)
        self._factory, self._refuse, self._public = factory, refuse, public
        self._loop = asyncio.get_running_loop()
        self._anteroom = Anteroom()
        self._visitors: set[_Visitor] = set()
        self._warned = 0.0
        for listener in self.sockets:
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Those that are through stay."""
        for listener in self.sockets:
            self._loop.remove_reader(listener)
            listener.close()
        self.sockets.clear()
        for visitor in list(self._visitors):
            visitor.end()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                logger.warning("no connection can be taken now: %s", error)
                self._loop.remove_reader(listener)
                self._loop.call_later(_PAUSE, self._resume, listener)
                return
            sock.setblocking(False)
            self._visitors.add(_Visitor(self, sock))

    def _resume(self, listener: socket.socket) -> None:
        if listener in self.sockets:
            self._loop.add_reader(listener, self._accept, listener)

    # -- what visitors ask

    def enter(self, visitor: _Visitor) -> int:
        return self._anteroom.enter(visitor.end)

    def leave(self, visitor: _Visitor, ticket: int) -> None:
        self._anteroom.leave(ticket)
        self._visitors.discard(visitor)

    def answer_plainly(self, data: bytes) -> bytes:
        return self._refuse(data)

    async def shake(self, sock: socket.socket) -> None:
        """The handshake; then the connection serves itself.  Raises OSError, ConfigError."""
        found = contexts()
        assert found is not None
        context = found.public if self._public else found.server
        await self._loop.connect_accepted_socket(self._factory, sock, ssl=context, ssl_handshake_timeout=LIMIT)

    def warn(self, peer: str, error: Exception) -> None:
        if self._loop.time() > self._warned + _QUIET_FOR:
            self._warned = self._loop.time()
            reason = error.reason if isinstance(error, ssl.SSLError) else ""
            logger.warning("the connection from %s is closed: %s", peer, reason or error or type(error).__name__)


class _Visitor:
    """One that is not through."""

    def __init__(self, door: TlsDoor, sock: socket.socket) -> None:
        self._door, self._sock = door, sock
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._ticket = door.enter(self)
        self._timer = self._loop.call_later(LIMIT, self.end)
        self._loop.add_reader(sock, self._look)

    def end(self) -> None:
        """It has waited for long enough, or others need the place."""
        if self._task is None:
            self._go()
        else:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # the task notices

    def _look(self) -> None:
        """Its first byte says what it speaks."""
        try:
            first = self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        if first == CLIENT_HELLO:
            self._loop.remove_reader(self._sock)
            self._task = self._loop.create_task(self._shake())
            return
        if first:
            with contextlib.suppress(OSError):
                self._sock.send(self._door.answer_plainly(self._sock.recv(_LARGEST_WORD)))
                self._sock.shutdown(socket.SHUT_WR)
        self._go()

    async def _shake(self) -> None:
        peer = ""
        try:
            peer = self._sock.getpeername()[0]
            await self._door.shake(self._sock)
        except (OSError, ConfigError) as error:  # (those of ssl and of time limits are OSErrors)
            self._door.warn(peer or "somebody", error)
            self._sock.close()
        finally:
            self._timer.cancel()
            self._door.leave(self, self._ticket)

    def _go(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._timer.cancel()
        self._door.leave(self, self._ticket)
