"""The master's RPC port, with TLS where that is set."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from mooncake.errors import ErrorCode
from mooncake.master.refusals import failed
from mooncake.rpc import frame
from mooncake.rpc.handshake import MOST_BYTES
from mooncake.security.tls_files import EXPECTED, speaks_tls

if TYPE_CHECKING:
    from mooncake.security.tls_door import TlsDoor

    Listening = asyncio.Server | TlsDoor

_BACKLOG = 1024


async def listen(where: socket.socket | tuple[str, int], session: Callable[[], asyncio.Protocol]) -> Listening:
    """Serve each connection to a bound socket, or an address, with a `session`.  Raises OSError if the address cannot
    be had."""
    loop = asyncio.get_running_loop()
    if not speaks_tls():
        if isinstance(where, socket.socket):
            return await loop.create_server(session, sock=where, backlog=_BACKLOG)
        return await loop.create_server(session, *where, backlog=_BACKLOG)
    from mooncake.security.tls_door import TlsDoor

    listener = where if isinstance(where, socket.socket) else _bound(*where)
    listener.listen(_BACKLOG)
    return TlsDoor([listener], session, _refuse)


def _bound(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family)


def _refuse(data: bytes) -> bytes:
    """What to say to somebody who speaks plainly."""
    try:
        frames = frame.FrameReader(MOST_BYTES).feed(data)
    except frame.FramingError:
        return b""
    if not frames:
        return b""
    return failed(frames[0], ErrorCode.ILLEGAL_CLIENT, EXPECTED)
