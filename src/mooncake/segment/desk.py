"""What a `mooncake_client` tells stores of its host that know nothing but its port: where the master is.

The pool's memory they then map themselves (see transfer.shm); nothing of theirs passes through here.
"""

import contextlib
import logging
import socket
import threading

import msgspec

from mooncake.rpc import frame
from mooncake.rpc.messages import DECODERS, PROTOCOL, Hello, Welcome, encode
from mooncake.rpc.porter import porter_for
from mooncake.rpc.sockets import set_time_limit
from mooncake.rpc.task_messages import Introduce, Introduction
from mooncake.security.secret import read_secret
from mooncake.version import __version__

logger = logging.getLogger("mooncake.segment")

_LIMIT = 1.0  # seconds for one visitor


class Desk(threading.Thread):
    """Answers on `listener` until the process ends."""

    def __init__(self, listener: socket.socket, introduction: Introduction) -> None:
        super().__init__(name="mooncake-desk", daemon=True)
        self._listener = listener
        self._introduction = introduction
        self._porter = porter_for(read_secret(), _welcome, self._receive)

    def run(self) -> None:
        while True:
            try:
                visitor, _ = self._listener.accept()
            except OSError as error:
                logger.warning("nobody can be introduced to the pool any more: %s", error)
                return
            if self._porter is None:
                self._receive(visitor)
            else:
                self._porter.take(visitor)

    def _receive(self, visitor: socket.socket) -> None:
        with visitor, contextlib.suppress(OSError, frame.FramingError, msgspec.MsgspecError):
            set_time_limit(visitor, _LIMIT)
            self._serve(visitor)

    def _serve(self, visitor: socket.socket) -> None:
        reader = frame.FrameReader()
        while data := visitor.recv(4096):
            for got in reader.feed(data):
                message = DECODERS[got.kind].decode(got.body) if got.kind in DECODERS else None
                if isinstance(message, Hello):
                    visitor.sendall(frame.pack(got.kind, frame.REPLY, got.request_id, encode(_welcome())))
                elif isinstance(message, Introduce):
                    visitor.sendall(frame.pack(got.kind, frame.REPLY, got.request_id, encode(self._introduction)))
                else:
                    return


def _welcome() -> Welcome:
    return Welcome(PROTOCOL, __version__, 1, 0)


def open_desk(host: str, port: int, introduction: Introduction) -> None:
    """Answer on this port, if it is free."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        logger.warning(
            "port %d cannot be listened on (%s): setup_dummy will not find this process; give another --port",
            port,
            error.strerror,
        )
        return
    Desk(listener, introduction).start()
