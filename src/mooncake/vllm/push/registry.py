"""Who a prefill instance's workers are: a small HTTP service of its first worker, and how they make themselves known.

    POST /register   {"engine_id", "dp_rank", "tp_rank", "pp_rank", "addr", "tp_size", "pp_size", "started"}
    GET  /query      {data parallel rank: {"engine_id", "worker_addr": {tp rank: {pp rank: address}}}}

Workers say it again every few seconds, so a registry that was restarted knows them soon, and an engine that is gone is
forgotten.  An engine that started later replaces the one before it.  An engine is shown once all its workers are known.
"""

import asyncio
import logging
import socket
import time
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from mooncake.errors import ConfigError
from mooncake.security.bearer import require_bearer
from mooncake.security.http_port import serve_http
from mooncake.security.https import aiohttp_tls
from mooncake.security.secret import authorization, read_secret
from mooncake.security.tls_files import scheme
from mooncake.vllm.push.routes import Ranks
from mooncake.vllm.push.settings import PORT_VARIABLE

logger = logging.getLogger("vllm.mooncake")

_EVERY = 2.0  # seconds between two announcements
_SOON = 0.2  # seconds until one that failed is tried again
_FORGOTTEN_AFTER = 30.0  # seconds without one
_LIMIT = 3.0


class Registration(msgspec.Struct):
    engine_id: str
    dp_rank: int
    tp_rank: int
    pp_rank: int
    addr: str
    tp_size: int = 0
    pp_size: int = 0
    started: float = 0.0


class _Engine:
    def __init__(self, first: Registration) -> None:
        self.id, self.started = first.engine_id, first.started
        self.size = first.tp_size * first.pp_size  # 0: unknown
        self.workers: dict[int, dict[int, str]] = {}
        self.heard = time.monotonic()

    def is_whole(self) -> bool:
        return sum(map(len, self.workers.values())) >= max(1, self.size)


class Registry:
    """Engines by data parallel rank."""

    def __init__(self) -> None:
        self._engines: dict[int, _Engine] = {}

    def register(self, worker: Registration) -> str:
        """Empty, or why not."""
        engine = self._engines.get(worker.dp_rank)
        if engine is None or engine.id != worker.engine_id:
            if engine is not None and engine.started > worker.started:
                return f"engine {engine.id}, which started later, has data parallel rank {worker.dp_rank}"
            engine = self._engines[worker.dp_rank] = _Engine(worker)
        engine.heard = time.monotonic()
        engine.workers.setdefault(worker.tp_rank, {})[worker.pp_rank] = worker.addr
        return ""

    def engines(self) -> dict[int, dict[str, Any]]:
        """What a query is answered with."""
        now = time.monotonic()
        for rank, engine in list(self._engines.items()):
            if engine.started and now > engine.heard + _FORGOTTEN_AFTER:
                del self._engines[rank]
        return {
            rank: {"engine_id": engine.id, "worker_addr": engine.workers}
            for rank, engine in self._engines.items()
            if engine.is_whole()
        }


async def serve(registry: Registry, host: str, port: int) -> web.AppRunner:
    """Until the runner's cleanup.  Raises ConfigError if the port cannot be had."""

    async def register(request: web.Request) -> web.Response:
        try:
            worker = msgspec.json.decode(await request.read(), type=Registration)
        except msgspec.MsgspecError as error:
            return web.json_response({"detail": f"this is no registration: {error}"}, status=422)
        refused = registry.register(worker)
        return web.json_response({"detail": refused} if refused else {"status": "ok"}, status=400 if refused else 200)

    async def query(request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(registry.engines()), content_type="application/json")

    app = web.Application(middlewares=require_bearer(read_secret(), open_paths=frozenset({"/query"})))
    app.add_routes([web.post("/register", register), web.get("/query", query)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await serve_http(runner, socket.create_server((host, port)))
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"the bootstrap registry cannot listen on port {port} ({error.strerror}); give every prefill instance of a "
            f"host a port of its own in {PORT_VARIABLE}"
        ) from None
    return runner


async def announce(url: str, worker: Registration) -> None:
    """Make a worker known, for ever."""
    body = msgspec.json.encode(worker)
    headers, said = {**_JSON, **authorization()}, ""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_LIMIT)) as session:
        while True:
            try:
                async with session.post(f"{url}/register", data=body, headers=headers, ssl=aiohttp_tls()) as answer:
                    problem = "" if answer.status == 200 else (await answer.text())[:500]
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                problem = repr(error)
            if problem != said:
                logger.warning("The registry at %s %s", url, f"does not know us: {problem}" if problem else "knows us")
                said = problem
            await asyncio.sleep(_SOON if problem else _EVERY)


_JSON = {"Content-Type": "application/json"}


class _Entry(msgspec.Struct):
    engine_id: str
    worker_addr: dict[int, dict[int, str]]


class UnknownEngineError(Exception):
    """The registry cannot be reached, or does not know the engine."""


class Workers(msgspec.Struct):
    """Of one engine: by (tensor, pipeline) rank, where."""

    addresses: dict[tuple[int, int], str]
    tensor_size: int
    pipeline_size: int


class Directory:
    """What registries have said; of one event loop."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Workers] = {}

    def forget(self, registry: str, engine: str) -> None:
        self._known.pop((registry, engine), None)

    async def find(self, registry: str, engine: str) -> Workers:
        """The workers of an engine.  Raises UnknownEngineError within a few seconds."""
        known = self._known.get((registry, engine))
        if known is not None:
            return known
        give_up = time.monotonic() + _LIMIT
        while True:
            try:
                found = await _query(registry)
                break
            except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, ValueError) as error:
                if time.monotonic() > give_up - 2 * _SOON:
                    raise UnknownEngineError(f"the registry at {registry} cannot be asked ({error!r})") from None
                await asyncio.sleep(_SOON)
        for entry in found.values():
            if entry.engine_id == engine:
                places = {(t, p): addr for t, stages in entry.worker_addr.items() for p, addr in stages.items()}
                sizes = len(entry.worker_addr), max(map(len, entry.worker_addr.values()), default=0)
                if len(self._known) > 1000:
                    self._known.clear()
                workers = self._known[registry, engine] = Workers(places, *sizes)
                return workers
        there = ", ".join(entry.engine_id for entry in found.values()) or "none"
        raise UnknownEngineError(
            f"engine {engine} is not at {registry} (there is {there}); it was restarted, or has ended"
        )


async def _query(registry: str) -> dict[int, _Entry]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_LIMIT)) as session,
        session.get(f"{scheme()}://{registry.partition('://')[2]}/query", ssl=aiohttp_tls()) as answer,
    ):
        return msgspec.json.decode(await answer.read(), type=dict[int, _Entry])


def registration(engine: str, data_rank: int, ranks: Ranks, address: str, started: float) -> Registration:
    return Registration(
        engine, data_rank, ranks.tensor, ranks.pipeline, address, ranks.tensor_size, ranks.pipeline_size, started
    )
