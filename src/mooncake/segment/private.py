"""A segment server that is an engine's private child: it obeys the engine on a socket, and ends with it.

Or, if it was told to linger, goes on without it for a while, and is the child of the next engine that takes it over.
"""

import contextlib
import os
import socket

from mooncake.errors import ConfigError, ErrorCode, MooncakeError
from mooncake.rpc import frame
from mooncake.rpc.message import Message
from mooncake.rpc.messages import DECODERS, Codes, Failure, Serving, encode
from mooncake.rpc.segment_messages import Figures, FiguresQuery, LeaveDisk
from mooncake.rpc.serving_messages import Serve, Stop
from mooncake.segment.lingering import Lingering
from mooncake.segment.server import SegmentServer, logger


def serve_private(channel: socket.socket, engine_pidfd: int) -> None:
    """Its whole life."""
    header = channel.recv(frame.HEADER_SIZE, socket.MSG_WAITALL)
    length, kind, _, request_id = frame.HEADER.unpack(header)
    config = DECODERS[kind].decode(channel.recv(length, socket.MSG_WAITALL))
    if not isinstance(config, Serve):
        raise ConfigError("the first message on the private socket must be Serve")
    try:
        server = SegmentServer(config)
        engines = _Engines(server, config)
        writer = engines.watch(engine_pidfd)
        server.start()
    except (OSError, MooncakeError) as error:
        failure = Failure(ErrorCode.INTERNAL_ERROR, str(error))
        channel.sendall(frame.pack(kind, frame.REPLY | frame.FAILED, request_id, encode(failure)))
        return
    answer = frame.pack(kind, frame.REPLY, request_id, encode(Serving(server.info, writer)))
    socket.send_fds(channel, [answer], server.descriptors)
    engines.obey(channel)
    server.run()
    engines.close()
    server.close()


class _Engines:
    """The engine that the server belongs to, and what follows when it has gone."""

    def __init__(self, server: SegmentServer, config: Serve) -> None:
        self._server = server
        self._config = config
        self._linger_ms = config.linger_ms
        self._channel: socket.socket | None = None
        self._pidfd = -1  # of the engine; a former one may live on, and write until it dies
        self._lingering: Lingering | None = None
        server.when_forgotten(self._forgotten)

    def watch(self, pidfd: int) -> int:
        """The engine behind `pidfd` has the server from now on; its number as a writer.  Raises OSError."""
        writer = self._server.serve_engine(pidfd, lambda: self._gone(pidfd))
        self._pidfd = pidfd
        return writer

    def obey(self, channel: socket.socket) -> None:
        """Do whatever comes on `channel`, while the server runs."""
        self._channel = channel
        reader = frame.FrameReader()

        def ready() -> None:
            if channel is not self._channel:
                return
            try:
                data = channel.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._silent(channel)
                return
            for got in reader.feed(data):
                message = DECODERS[got.kind].decode(got.body) if got.kind in DECODERS else None
                leaves = isinstance(message, Stop) and not message.grace_ms
                lingers = leaves and self._linger_ms > 0
                reply = Codes([0]) if lingers else _do(self._server, message)
                channel.setblocking(True)
                with contextlib.suppress(OSError):
                    channel.sendall(frame.pack(got.kind, frame.REPLY, got.request_id, encode(reply)))
                channel.setblocking(False)
                if leaves:
                    self._leave()
                    return

        channel.setblocking(False)
        self._server.watch(channel.fileno(), ready)

    def close(self) -> None:
        """The server ends."""
        if self._lingering is not None:
            self._lingering.end()

    # -- the end of an engine

    def _gone(self, pidfd: int) -> None:
        if pidfd == self._pidfd:
            self._leave()

    def _silent(self, channel: socket.socket) -> None:
        """The channel has ended: the engine is dying, as its pidfd will say, or never got the server."""
        if self._linger_ms:
            self._leave()
        else:
            self._server.unwatch(channel.fileno())
            self._channel = None

    def _leave(self) -> None:
        """No engine has the server any more."""
        self._pidfd = -1
        channel, self._channel = self._channel, None
        if channel is not None:
            self._server.unwatch(channel.fileno())
            channel.close()
        if not self._linger_ms:
            self._server.stop()
            return
        try:
            self._lingering = Lingering(self._server, self._config, self._linger_ms, self._taken)
        except OSError as error:
            logger.warning("segment %s cannot linger: %s", self._server.info.name, error)
            self._server.stop()
            return
        logger.info(
            "the engine of segment %s is gone; its values stay for %.0f s, for the next one",
            self._server.info.name,
            self._linger_ms / 1e3,
        )
        _fall_silent()

    def _taken(self, channel: socket.socket, pidfd: int, linger_ms: int) -> int:
        """Raises OSError if the engine cannot be watched: it does not get the server."""
        writer = self.watch(pidfd)
        assert self._lingering is not None
        self._lingering.end()
        self._lingering = None
        self._linger_ms = linger_ms
        self._server.stay()
        self.obey(channel)
        logger.info("another engine has taken segment %s over", self._server.info.name)
        return writer

    def _forgotten(self) -> None:
        """The master has dropped what is here (called by another thread)."""
        if self._lingering is not None:
            self._server.stop()


def _fall_silent() -> None:
    """Let go of where messages went: whoever reads what the engine has written waits for its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(nowhere, standard)
    os.close(nowhere)


def _do(server: SegmentServer, message: Message | None) -> Message:
    if isinstance(message, Stop):
        if message.grace_ms:
            server.retire(message.grace_ms / 1e3)
        else:
            server.unmount()
        return Codes([0])
    if isinstance(message, LeaveDisk):
        server.leave_disk()
        return Codes([0])
    if isinstance(message, FiguresQuery):
        return Figures(server.figures())
    return Codes([int(ErrorCode.INVALID_PARAMS)])
