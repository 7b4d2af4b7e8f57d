"""What a standby answers: to stores and segment servers that somebody else leads, over HTTP how it is."""

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, cast

from aiohttp import web

from mooncake.errors import ErrorCode
from mooncake.master.candidate import Candidate
from mooncake.master.listening import listen
from mooncake.master.refusals import failed
from mooncake.master.replies import OF_TENANTS, health_reply, json_reply, leader_reply
from mooncake.rpc import frame
from mooncake.rpc.handshake import MOST_BYTES
from mooncake.security.anteroom import LIMIT
from mooncake.security.bearer import require_admin_key
from mooncake.security.http_port import serve_http
from mooncake.security.secret import Secret

if TYPE_CHECKING:
    from mooncake.master.listening import Listening

log = logging.getLogger("mooncake.master")

_CODE = ErrorCode.UNAVAILABLE_IN_CURRENT_STATUS


class StandbyPort:
    """Refuses every request on a listening socket, with a code by which clients know to look for the leader."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate = candidate
        self._server: Listening | None = None
        self._open: set[asyncio.Transport] = set()

    async def start(self, listening: socket.socket) -> None:
        self._server = await listen(listening, lambda: _Refusal(self._candidate, self._open))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for transport in list(self._open):
            transport.abort()


class _Refusal(asyncio.Protocol):
    def __init__(self, candidate: Candidate, others: set[asyncio.Transport]) -> None:
        self._candidate = candidate
        self._others = others
        self._reader = frame.FrameReader(MOST_BYTES)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._others.add(self._transport)
        asyncio.get_running_loop().call_later(LIMIT, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._others.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            for got in self._reader.feed(data):
                if not got.flags & frame.ONE_WAY:
                    self._transport.write(failed(got, _CODE, why_refused(self._candidate)))
                self._transport.close()
        except frame.FramingError:
            self._transport.abort()


def why_refused(candidate: Candidate) -> str:
    """One sentence, for whoever came here."""
    if candidate.leader is None:
        return "this master is a standby, and nobody leads now; try again"
    return (
        "this master is a standby; give clients the back end's address (etcd://, redis://, k8s://) to follow the leader"
    )


class StandbyAdmin:
    """The HTTP interface of a standby."""

    def __init__(self, candidate: Candidate, admin_key: Secret | None, secret: Secret | None) -> None:
        self._candidate = candidate
        application = web.Application(middlewares=require_admin_key(admin_key, secret, of_tenants=OF_TENANTS))
        get = application.router.add_get
        get("/health", self._get_health)
        get("/role", self._get_role)
        get("/ha_status", self._get_ha_status)
        get("/leader", self._get_leader)
        get("/metrics", self._get_metrics)
        get("/metrics/summary", self._get_summary)
        application.router.add_route("*", "/{other:.*}", self._refuse)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=0.1)

    async def start(self, listening: socket.socket) -> None:
        await self._runner.setup()
        await serve_http(self._runner, listening)

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _get_health(self, _: web.Request) -> web.Response:
        return health_reply("standby", self._state, False, self._candidate.leader)

    async def _get_role(self, _: web.Request) -> web.Response:
        return web.Response(text="standby")

    async def _get_ha_status(self, _: web.Request) -> web.Response:
        return web.Response(text=self._state)

    async def _get_leader(self, _: web.Request) -> web.Response:
        return leader_reply(self._candidate.leader)

    async def _get_metrics(self, _: web.Request) -> web.Response:
        lines = (
            "# HELP ha_standby_state High availability: state of the standby",
            "# TYPE ha_standby_state gauge",
            f"ha_standby_state {int(not self._candidate.problem)}",
        )
        return web.Response(text="\n".join(lines) + "\n")

    async def _get_summary(self, _: web.Request) -> web.Response:
        return web.Response(text=f"role=standby, state={self._state}, service_ready=false, master={{}}, ha={{}}")

    async def _refuse(self, _: web.Request) -> web.Response:
        error = {"success": False, "error_code": int(_CODE), "error_message": why_refused(self._candidate)}
        return json_reply(error, 503)

    @property
    def _state(self) -> str:
        """`standby`, or `disconnected`: the back end does not answer."""
        return "disconnected" if self._candidate.problem else "standby"
