"""The connections between workers of prefill and decode, with TLS where that is set."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from mooncake.security.tls_files import EXPECTED, check_files, speaks_tls
from mooncake.vllm.push.wire import Refused, pack

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def open_stream(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError with a sentence."""
    if not speaks_tls():
        return await asyncio.open_connection(host, port)
    from mooncake.rpc.tls_socket import why_not
    from mooncake.security.https import cluster_context

    try:
        return await asyncio.open_connection(host, port, ssl=cluster_context(), server_hostname=host)
    except ConnectionRefusedError:
        raise
    except OSError as error:
        raise OSError(why_not(error)) from None


async def serve_streams(serve: Serve, host: str) -> int:
    """The port where `serve` gets every connection until the loop is closed.  Raises OSError, ConfigError."""
    check_files()
    if not speaks_tls():
        server = await asyncio.start_server(serve, host, 0)
        port: int = server.sockets[0].getsockname()[1]
        return port
    from mooncake.security.tls_door import TlsDoor

    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)

    def stream() -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=loop), serve, loop=loop)

    TlsDoor([listener], stream, lambda _: pack(Refused(EXPECTED)))
    return int(listener.getsockname()[1])
