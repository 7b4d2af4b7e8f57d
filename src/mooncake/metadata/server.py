"""The HTTP interface: GET, PUT and DELETE of /metadata?key=KEY, and /health.

Keys are taken as the client means them, percent-encoded or not.  Two published servers differ in details; `Dialect` has
both.  Two headers go beyond the published interface: a PUT or DELETE with If-Match changes only what has that ETag
(412 otherwise), and Mooncake-TTL says after how many seconds an entry ends unless it is written again.
"""

import asyncio
import contextlib
import logging
import socket
import time
from enum import Enum
from hashlib import sha256
from math import inf

from aiohttp import web

from mooncake.metadata.table import LARGEST_VALUE, LONGEST_KEY, MetadataTable, TableFullError
from mooncake.security.bearer import require_bearer
from mooncake.security.http_port import serve_http
from mooncake.security.secret import read_secret

logger = logging.getLogger("mooncake.metadata")

SWEEP_SECONDS = 2.0


class Dialect(Enum):
    """Whose wording and rules: of the stand-alone server, or of the master's."""

    STANDALONE = "metadata key is required"
    MASTER = "Missing key parameter"


class MetadataServer:
    """Serves one table on a socket that is listening already."""

    def __init__(self, dialect: Dialect) -> None:
        self.table = MetadataTable(time.monotonic)
        self._dialect = dialect
        self._gone: set[str] = set()
        self._sweeper: asyncio.Task[None] | None = None
        application = web.Application(client_max_size=LARGEST_VALUE, middlewares=require_bearer(read_secret()))
        application.router.add_get("/health", _health)
        route = application.router.add_resource("/metadata")
        route.add_route("GET", self._get)
        route.add_route("PUT", self._put)
        route.add_route("DELETE", self._delete)
        self._runner = web.AppRunner(
            application, access_log=None, handle_signals=False, shutdown_timeout=0.1, max_line_size=4 * LONGEST_KEY
        )

    async def start(self, listening: socket.socket) -> None:
        await self._runner.setup()
        await serve_http(self._runner, listening)
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        await self._runner.cleanup()

    def forget(self, segment: str) -> None:
        """Remove the entries of a segment, soon."""
        self._gone.add(segment)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            gone, self._gone = self._gone, set()
            for _ in self.table.sweep(gone):
                await asyncio.sleep(0)

    # -- routes

    async def _get(self, request: web.Request) -> web.Response:
        key = self._key(request)
        value = self.table.get(key)
        if value is None:
            return web.Response(status=404, text="metadata not found")
        return web.Response(body=value, content_type="application/json", headers={"ETag": _entity_tag(value)})

    async def _put(self, request: web.Request) -> web.Response:
        key = self._key(request)
        ttl = _time_to_live(request)
        value = await request.read()  # 413 beyond LARGEST_VALUE
        former = self.table.get(key)
        wanted = request.headers.get("If-Match")
        if wanted is not None:
            if former is None or _entity_tag(former) != wanted:
                return web.Response(status=412, text="the metadata is another by now")
        elif former is not None and "rpc_meta/" in key:
            if former != value or self._dialect is Dialect.STANDALONE:
                return web.Response(status=400, text="this server's address is there already; delete it first")
            self._write(key, value, ttl)
            return web.Response(text="metadata unchanged")
        self._write(key, value, ttl)
        return web.Response(text="metadata updated")

    async def _delete(self, request: web.Request) -> web.Response:
        key = self._key(request)
        former = self.table.get(key)
        if former is None:
            return web.Response(status=404, text="metadata not found")
        wanted = request.headers.get("If-Match")
        if wanted is not None and _entity_tag(former) != wanted:
            return web.Response(status=412, text="the metadata is another by now")
        self.table.remove(key)
        return web.Response(text="metadata deleted")

    def _key(self, request: web.Request) -> str:
        key = request.query.get("key", "")
        if not key:
            raise web.HTTPBadRequest(text=self._dialect.value)
        if len(key) > LONGEST_KEY:
            raise web.HTTPBadRequest(text=f"a key has at most {LONGEST_KEY} characters")
        return key

    def _write(self, key: str, value: bytes, ttl: float) -> None:
        try:
            self.table.put(key, value, ttl)
        except TableFullError as error:
            logger.warning("%s", error)
            raise web.HTTPInsufficientStorage(text=str(error)) from None


async def _health(_: web.Request) -> web.Response:
    return web.Response(text="OK")


def _time_to_live(request: web.Request) -> float:
    text = request.headers.get("Mooncake-TTL")
    if text is None:
        return inf
    if not (text.isascii() and text.isdecimal()) or int(text[:9]) == 0:
        raise web.HTTPBadRequest(text="Mooncake-TTL must be a whole number of seconds above 0")
    return float(text[:9])


def _entity_tag(value: bytes) -> str:
    return f'"{sha256(value).hexdigest()[:32]}"'
