"""The proxy's HTTP server: OpenAI's routes, answered through the instances, and the routes about the proxy itself."""

import logging
import socket
import uuid
from collections.abc import Sequence

import aiohttp
import msgspec
from aiohttp import web

from mooncake.proxy import resume
from mooncake.proxy.admin import Admin
from mooncake.proxy.call import Call
from mooncake.proxy.config import ProxyConfig
from mooncake.proxy.errors import JSON, Answered, Refused, UpstreamError, error_response
from mooncake.proxy.exchange import ClientGone, Exchange, Services
from mooncake.proxy.headers import REQUEST_ID, to_client, to_engine
from mooncake.proxy.indexer import Indexer
from mooncake.proxy.instances import ANY, Fleet, Instance, Role
from mooncake.proxy.keeper import Keeper
from mooncake.proxy.metrics import Metrics
from mooncake.proxy.policies import POLICIES
from mooncake.security.http_port import serve_http
from mooncake.security.https import outside_context

logger = logging.getLogger(__name__)

_LARGEST_BODY = 256 << 20  # bytes; prompts may hold images
_KEEP_ALIVE_S = 3.0  # towards engines: less than uvicorn's 5, so that it is not the engine that closes
_MODELS_S = 10.0
_SHUTDOWN_S = 5.0
_CLIENT_GONE = 499


class Proxy:
    """Serves on a socket that is listening already."""

    def __init__(self, config: ProxyConfig, instances: Sequence[Instance]) -> None:
        self._config = config
        self._first_instances = instances
        self._metrics = Metrics()
        self._fleet = Fleet(POLICIES[config.policy], self._metrics)
        self._metrics.watch(self._fleet)

    async def start(self, listening: socket.socket) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=outside_context())
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.limits.connect_s),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        indexer = Indexer(self._config, self._fleet, self._metrics, self._session) if self._config.indexer else None
        self._services = Services(self._config, self._fleet, self._metrics, self._session, indexer)
        self._keeper = Keeper(self._config, self._fleet, self._session)
        for instance in self._first_instances:
            self._keeper.add(instance)
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,  # a client that goes away ends what runs for it
            shutdown_timeout=_SHUTDOWN_S,
        )
        await self._runner.setup()
        await serve_http(self._runner, listening, backlog=1024, public=True)

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self._keeper.close()
        for task in self._services.background:
            task.cancel()
        await self._session.close()

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=_LARGEST_BODY)
        Admin(self._config, self._fleet, self._keeper, self._metrics).add_routes(application.router)
        application.router.add_get("/v1/models", self._get_models)
        for path in (resume.COMPLETIONS, resume.CHAT):
            application.router.add_post(path, self._complete)
        return application

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        status = _CLIENT_GONE
        request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
        try:
            answer = await self._answer(request, request_id)
            status = answer.status
            if not answer.prepared:
                answer.headers[REQUEST_ID] = request_id
            return answer
        except ClientGone:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=_CLIENT_GONE)
        finally:
            self._metrics.count_request(request.path, status)
            if status == _CLIENT_GONE:
                self._metrics.disconnects.inc()

    async def _answer(self, request: web.Request, request_id: str) -> web.StreamResponse:
        if request.content_type != JSON:
            return error_response(415, "Expected a body of Content-Type application/json.")
        raw = await request.read()
        try:
            body = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            return error_response(400, f"The body is not JSON: {error}.")
        if not isinstance(body, dict):
            return error_response(400, "The body must be a JSON object.")
        return await Exchange(self._services, request, request_id, raw, body).run()

    async def _get_models(self, request: web.Request) -> web.StreamResponse:
        """The list of one instance stands for all: they serve the same model."""
        avoid: set[Instance] = set()
        last: UpstreamError = Refused("no instance is available", 503)
        request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
        headers = to_engine(request.headers, request_id)
        for _ in range(1 + self._config.limits.retries):
            instance = self._fleet.choose(Role.DECODE, ANY, avoid) or self._fleet.choose(Role.PREFILL, ANY, avoid)
            if instance is None:
                break
            try:
                async with (
                    Call(instance, _MODELS_S, lambda: True),
                    self._session.get(instance.path("/v1/models"), headers=headers) as response,
                ):
                    answered = Answered(response.status, to_client(response.headers, request_id), await response.read())
                    return answered.response()
            except UpstreamError as error:
                last = error
                avoid.add(instance)
                self._fleet.suspect(instance, error.why)
        return error_response(last.status, f"No instance could answer: {last.why}.")
