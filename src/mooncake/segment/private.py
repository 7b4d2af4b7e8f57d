"""A segment server that is an engine's private child: it obeys the engine on a socket, and ends with it."""

import contextlib
import socket

from mooncake.errors import ConfigError, ErrorCode, MooncakeError
from mooncake.rpc import frame
from mooncake.rpc.message import Message
from mooncake.rpc.messages import DECODERS, Codes, Failure, Serve, Serving, Stop, encode
from mooncake.rpc.segment_messages import Figures, FiguresQuery, LeaveDisk
from mooncake.segment.server import SegmentServer


def serve_private(channel: socket.socket, engine_pidfd: int) -> None:
    """Its whole life."""
    header = channel.recv(frame.HEADER_SIZE, socket.MSG_WAITALL)
    length, kind, _, request_id = frame.HEADER.unpack(header)
    config = DECODERS[kind].decode(channel.recv(length, socket.MSG_WAITALL))
    if not isinstance(config, Serve):
        raise ConfigError("the first message on the private socket must be Serve")
    try:
        server = SegmentServer(config, engine_pidfd)
        server.start()
    except (OSError, MooncakeError) as error:
        failure = Failure(ErrorCode.INTERNAL_ERROR, str(error))
        channel.sendall(frame.pack(kind, frame.REPLY | frame.FAILED, request_id, encode(failure)))
        return
    answer = frame.pack(kind, frame.REPLY, request_id, encode(Serving(server.info, server.engine_writer)))
    socket.send_fds(channel, [answer], server.descriptors)
    _obey(server, channel)
    server.run()
    server.close()


def _obey(server: SegmentServer, channel: socket.socket) -> None:
    """Whatever comes on `channel`, while the server runs."""
    reader = frame.FrameReader()

    def ready() -> None:
        try:
            data = channel.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            server.unwatch(channel.fileno())  # a dying engine; its pidfd says when
            return
        for got in reader.feed(data):
            message = DECODERS[got.kind].decode(got.body) if got.kind in DECODERS else None
            reply = _do(server, message)
            channel.setblocking(True)
            with contextlib.suppress(OSError):
                channel.sendall(frame.pack(got.kind, frame.REPLY, got.request_id, encode(reply)))
            channel.setblocking(False)
            if isinstance(message, Stop) and not message.grace_ms:
                server.stop()

    channel.setblocking(False)
    server.watch(channel.fileno(), ready)


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
