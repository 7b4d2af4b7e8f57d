"""The indexer's HTTP server: who publishes, and who has how much of a prompt."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec
import zmq.asyncio
from aiohttp import web

from mooncake.indexer.config import IndexerConfig, Registration, parse_registration
from mooncake.indexer.hashing import Chain, token_bytes
from mooncake.indexer.index import Holding, Index, Known, Prefix, match
from mooncake.indexer.metrics import CONTENT_TYPE, Metrics
from mooncake.indexer.subscription import Subscription
from mooncake.security.bearer import require_bearer
from mooncake.security.http_port import serve_http
from mooncake.security.secret import read_secret

logger = logging.getLogger(__name__)

_LARGEST_BODY = 64 << 20
_MOST_INSTANCES = 10_000
_DEFAULT_TENANT = "default"
_LONG = 1000  # blocks; 0.1 ms to find


class _Unregister(msgspec.Struct):
    instance_id: str
    tenant_id: str = ""
    dp_rank: int | None = None


class _Query(msgspec.Struct):
    token_ids: list[int]
    model: str | None = ""
    lora_name: str | None = ""
    tenant_id: str | None = ""
    instance_id: str | None = ""
    block_size: int | None = 0
    cache_salt: str | None = ""


class _QueryByHash(msgspec.Struct):
    seq_hashes: list[int] | None = None
    block_hash: int | list[int] | None = None
    model: str | None = ""
    tenant_id: str | None = ""
    instance_id: str | None = ""
    block_size: int | None = 0


class Indexer:
    """Serves on a socket that is listening already.  Raises ConfigError for a secret that is none."""

    def __init__(self, config: IndexerConfig) -> None:
        self._config = config
        self.secret = read_secret()
        self._index = Index(config.seed, config.most_blocks)
        self._subscriptions: dict[tuple[str, str, int], Subscription] = {}
        self._metrics = Metrics(self._index, self._subscriptions)
        self._in_turn = asyncio.Lock()

    async def start(self, listening: socket.socket) -> None:
        self._context = zmq.asyncio.Context()
        for registration in self._config.registrations:
            await self._register(registration)
        middlewares = [*require_bearer(self.secret), _answer_mistakes]
        application = web.Application(client_max_size=_LARGEST_BODY, middlewares=middlewares)
        router = application.router
        router.add_post("/register", self._post_register)
        router.add_post("/unregister", self._post_unregister)
        router.add_post("/query", self._post_query)
        router.add_post("/query_by_hash", self._post_query_by_hash)
        router.add_get("/health", self._get_health)
        router.add_get("/status", self._get_status)
        router.add_get("/metrics", self._get_metrics)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        await self._runner.setup()
        await serve_http(self._runner, listening, backlog=1024)

    async def stop(self) -> None:
        await self._runner.cleanup()
        for subscription in self._subscriptions.values():
            await subscription.close()
        self._context.destroy(linger=0)

    # ------------------------------------------------------------ who publishes

    async def _register(self, registration: Registration) -> None:
        """Raises ValueError."""
        async with self._in_turn:
            known = self._subscriptions.get(registration.name)
            if known is not None and known.registration == registration:
                return
            if known is None and len(self._subscriptions) >= _MOST_INSTANCES:
                raise ValueError(f"{_MOST_INSTANCES} instances are registered already")
            subscription = Subscription(registration, self._index, self._context)
            if known is not None:
                await known.close()
            self._subscriptions[registration.name] = subscription
            logger.info("%s is followed at %s", "|".join(map(str, registration.name)), registration.endpoint)

    async def _post_register(self, request: web.Request) -> web.Response:
        registration = parse_registration(msgspec.json.decode(await request.read()))
        await self._register(registration)
        return _json({"status": "registered successfully", "instance_id": registration.instance_id})

    async def _post_unregister(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=_Unregister)
        tenant = asked.tenant_id or _DEFAULT_TENANT
        removed = []
        async with self._in_turn:
            for name in list(self._subscriptions):
                if name[:2] == (asked.instance_id, tenant) and asked.dp_rank in (None, name[2]):
                    await self._subscriptions.pop(name).close()
                    removed.append("|".join(map(str, name)))
        if not removed:
            rank = "" if asked.dp_rank is None else f", dp_rank {asked.dp_rank}"
            return _error(f"instance {asked.instance_id} of tenant {tenant}{rank} is not registered", 404)
        return _json({"status": "unregistered successfully", "removed_instances": removed})

    # ------------------------------------------------------------ who has what

    async def _post_query(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=_Query)
        try:
            tokens = token_bytes(asked.token_ids)
        except OverflowError:
            raise ValueError("token_ids must be numbers from 0 to 4294967295") from None
        chains: dict[tuple[int, str, str], Chain] = {}

        def prompts(registration: Registration) -> list[Prefix]:
            lora, salt = asked.lora_name or "", asked.cache_salt or ""
            if registration.lora_name not in ("", lora) or registration.additionalsalt not in ("", salt):
                return []
            if registration.additionalsalt:
                salt = ""  # which all of its blocks have, so that none says so
            loras = {lora, ""} if registration.lora_name else {lora}  # of an adapter that is merged no block tells
            names = [(registration.block_size, one, salt) for one in loras]
            return [chains.setdefault(name, Chain(self._index.hasher, tokens, *name)) for name in names]

        self._metrics.queries.labels("query").inc()
        return await self._matches(asked, prompts)

    async def _post_query_by_hash(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=_QueryByHash)
        if (asked.seq_hashes is None) == (asked.block_hash is None):
            raise ValueError("expected either seq_hashes or block_hash")
        blocks = asked.seq_hashes if asked.seq_hashes is not None else asked.block_hash
        numbers = Known(number % (1 << 64) for number in ([blocks] if isinstance(blocks, int) else blocks or []))
        if asked.block_hash is not None:
            numbers = Known(number for block in numbers if (number := self._index.sequence_of(block)) is not None)
        self._metrics.queries.labels("query_by_hash").inc()
        return await self._matches(asked, lambda _: [numbers])

    async def _matches(
        self, asked: _Query | _QueryByHash, prompts: Callable[[Registration], Sequence[Prefix]]
    ) -> web.Response:
        """By tenant and instance, in tokens."""
        tenant = asked.tenant_id or _DEFAULT_TENANT
        found: dict[str, object] = {}
        for name, (first, ranks) in self._instances(tenant).items():
            wanted = (
                asked.instance_id in (None, "", name)
                and asked.block_size in (None, 0, first.block_size)
                and (not asked.model or first.modelname in ("", asked.model))
            )
            results = [match(prompt, ranks, first.block_size) for prompt in prompts(first)] if wanted else []
            if not results:
                continue
            result, size = max(results, key=lambda one: one.longest), first.block_size
            if result.longest > _LONG:
                await asyncio.sleep(0)  # others first
            found[name] = {
                "longest_matched": result.longest * size,
                "GPU": max(result.gpu.values()) * size,
                "DP": {str(rank): blocks * size for rank, blocks in sorted(result.gpu.items())},
                "CPU": result.cpu * size,
                "DISK": result.disk * size,
            }
        return _json({tenant: found})

    def _instances(self, tenant: str) -> dict[str, tuple[Registration, dict[int, Holding]]]:
        made: dict[str, tuple[Registration, dict[int, Holding]]] = {}
        for (name, owner, rank), subscription in self._subscriptions.items():
            if owner == tenant:
                made.setdefault(name, (subscription.registration, {}))[1][rank] = subscription.holding
        return made

    # ------------------------------------------------------------ about itself

    async def _get_health(self, _: web.Request) -> web.Response:
        return _json({"status": "ok", "instances": len(self._subscriptions)})

    async def _get_status(self, _: web.Request) -> web.Response:
        return _json({"blocks": self._index.blocks, "instances": list(_shown(self._subscriptions.values()))})

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})


def _shown(subscriptions: Iterable[Subscription]) -> Iterable[dict[str, Any]]:
    for one in subscriptions:
        counts = one.counts
        yield {
            **msgspec.to_builtins(one.registration),
            "connected": one.connected,
            "blocks": len(one.holding),
            "messages": counts.messages,
            "events": counts.events,
            "gaps": counts.gaps,
            "replayed": counts.replayed,
            "emptied": counts.emptied,
            "misread": counts.misread,
            "unlinked": one.holding.unlinked,
        }


@web.middleware
async def _answer_mistakes(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ValueError as error:  # msgspec's too
        return _error(f"{request.path}: {error}.", 400)


def _error(text: str, status: int) -> web.Response:
    return _json({"error": text}, status)


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), content_type="application/json", charset="utf-8", status=status
    )
