"""The master's RPC port, with TLS where that is set."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from mooncake.errors import ErrorCode
from mooncake.rpc import frame
from mooncake.rpc.handshake import MOST_BYTES
from mooncake.rpc.messages import Failure, encode
from mooncake.security.tls_files import EXPECTED, speaks_tls

if TYPE_CHECKING:
    from mooncake.security.tls_door import TlsDoor

    Listening = asyncio.Server | TlsDoor

_BACKLOG = 1024


async def listen(host: str, port: int, session: Callable[[], asyncio.Protocol]) -> Listening:
    """Serve each connection with a `session`.  Raises OSError if the address cannot be had."""
    loop = asyncio.get_running_loop()
    if not speaks_tls():
        return await loop.create_server(session, host, port, backlog=_BACKLOG)
    from mooncake.security.tls_door import TlsDoor

    family, *_, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    return TlsDoor([listener], session, _refuse)


def notice_lost_hosts(sock: socket.socket) -> None:
    """Have the kernel close a connection to a host that has been silent for 20 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 8)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)


def _refuse(data: bytes) -> bytes:
    """What to say to somebody who speaks plainly."""
    try:
        frames = frame.FrameReader(MOST_BYTES).feed(data)
    except frame.FramingError:
        return b""
    if not frames:
        return b""
    got = frames[0]
    failure = encode(Failure(int(ErrorCode.ILLEGAL_CLIENT), EXPECTED))
    return frame.pack(got.kind, frame.REPLY | frame.FAILED, got.request_id, failure)
