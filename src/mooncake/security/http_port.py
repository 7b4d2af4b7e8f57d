"""The ports of this package's HTTP servers: plain, or with TLS where that is set."""

import socket

from aiohttp import web

from mooncake.security.tls_door import TlsDoor
from mooncake.security.tls_files import PLAIN_HTTP, check_files, speaks_tls


async def serve_http(runner: web.AppRunner, listening: socket.socket, backlog: int = 128, public: bool = False) -> None:
    """Answer on a bound socket until the runner's cleanup.  `public`: with TLS, users need no certificate.

    Raises OSError, ConfigError."""
    check_files()
    if speaks_tls():
        await _TlsSite(runner, listening, backlog, public).start()
    else:
        await web.SockSite(runner, listening, backlog=backlog).start()


class _TlsSite(web.BaseSite):
    def __init__(self, runner: web.AppRunner, listening: socket.socket, backlog: int, public: bool) -> None:
        super().__init__(runner, backlog=backlog)
        self._listening, self._public = listening, public
        self._door: TlsDoor | None = None

    @property
    def name(self) -> str:
        host, port = self._listening.getsockname()[:2]
        return f"https://{host}:{port}"

    async def start(self) -> None:
        await super().start()
        factory = self._runner.server
        assert factory is not None
        self._listening.listen(self._backlog)
        self._door = TlsDoor([self._listening], factory, lambda _: PLAIN_HTTP, self._public)

    async def stop(self) -> None:
        if self._door is not None:
            self._door.close()
        await super().stop()
