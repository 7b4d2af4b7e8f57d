"""The workers' half: what a worker of prefill, of decode, or of both owns, and when each part is called."""

import logging
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from mooncake.engine.settings import read_settings
from mooncake.errors import ConfigError
from mooncake.security.tls_files import scheme
from mooncake.transfer.engine import Engine
from mooncake.vllm.device import Fence
from mooncake.vllm.push import registry
from mooncake.vllm.push.copies import Copies
from mooncake.vllm.push.counts import Counts
from mooncake.vllm.push.geometry import layers_of, regions_of
from mooncake.vllm.push.loop import LoopThread
from mooncake.vllm.push.pulls import Pulls
from mooncake.vllm.push.pushes import Pushes
from mooncake.vllm.push.serving import Server
from mooncake.vllm.push.settings import PushSettings
from mooncake.vllm.push.site import Site
from mooncake.vllm.push.stepping import Steps
from mooncake.vllm.push.wire import PROTOCOL, Greet

if TYPE_CHECKING:
    from mooncake.vllm.push.plan import PushPlan

logger = logging.getLogger("vllm.mooncake")

_START_LIMIT = 30.0  # seconds


class Worker:
    def __init__(self, settings: PushSettings, site: Site, counts: Counts, *, hands: bool, pulls: bool) -> None:
        """`hands`, `pulls`: what this role does.  Raises ConfigError."""
        self._settings, self._site = settings, site
        self._hands, self._pulls = hands, pulls
        self._counts = counts
        self._engine: Engine | None = None
        self._loop: LoopThread | None = None
        self._device: Any = None
        self.pushes: Pushes | None = None
        self.steps: Steps | None = None
        self.pulling: Pulls | None = None
        self._copies: Copies | None = None
        self._registry: web.AppRunner | None = None
        self.serves_registry = hands and site.is_first and not settings.bootstrap_server_address
        if self.serves_registry:  # before the memory of a model is filled: a port that is taken is found out early
            self._loop = LoopThread("mooncake-push-loop")
            self._registry = self._loop.start(
                registry.serve(registry.Registry(), "0.0.0.0", settings.bootstrap_port)
            ).result(_START_LIMIT)

    def register(self, caches: Mapping[str, Any]) -> None:
        """The KV cache, by layer.  Raises ConfigError, OSError."""
        site, settings = self._site, self._settings
        layers = layers_of(caches, site.num_blocks, site.block_size)
        self._device = next(iter(caches.values())).device
        engine = self._engine = Engine(read_settings(site.host, "P2PHANDSHAKE", settings.mooncake_protocol))
        regions = regions_of(caches)
        code, reason = engine.regions.register(list(regions), list(regions.values()))
        if code:
            raise ConfigError(f"the KV cache cannot be registered with the transfer engine: {reason}")
        loop = self._loop = self._loop or LoopThread("mooncake-push-loop")
        if self._hands:
            self._copies = Copies(engine, settings.num_workers)
            self.pushes = Pushes(self._copies, len(layers.names), settings.abort_limit, self._counts)
            fence = partial(Fence, self._device)
            self.steps = Steps(self.pushes, layers.names, layers.block_bytes, fence, site.hooks)
            server = Server(loop, self.pushes, site.engine, site.ranks, layers, site.heads, site.block_size)
            loop.start(server.start(site.host)).result(_START_LIMIT)
            registration = registry.registration(site.engine, site.data_rank, site.ranks, server.address, time.time())
            loop.start(registry.announce(f"{scheme()}://{self._registry_address}", registration))
        if self._pulls:
            name = f"{site.engine}/{secrets.token_hex(8)}"

            def greet(engine_id: str) -> Greet:
                return Greet(PROTOCOL, engine_id, name, engine.session, site.ranks, site.heads, site.block_size, layers)

            def settle(blocks: list[int]) -> None:
                engine.regions.settle(layers.ranges(blocks))

            self.pulling = Pulls(loop, greet, site.ranks, site.heads, settings.abort_limit, settle, self._counts)
        logger.info(
            "MooncakeConnector: %d layers, blocks of %d bytes, reached as %s",
            len(layers.names),
            sum(layers.block_bytes),
            engine.session,
        )

    @property
    def _registry_address(self) -> str:
        return self._settings.bootstrap_server_address or f"{self._site.registry_host}:{self._settings.bootstrap_port}"

    # -- each step

    def withdraw(self, plan: "PushPlan") -> None:
        """Before anything is written to blocks that the step has taken from requests."""
        if self.pushes is None:
            return
        for request in plan.preempted:
            self.pushes.preempted(request)
        for transfer, reason in plan.dropped.items():
            self.pushes.dropped(transfer, reason)

    def begin_step(self, plan: "PushPlan") -> None:
        """Before the forward pass."""
        if self.pushes is None or self.steps is None:
            return
        self.withdraw(plan)  # not every step of vLLM's says so by itself
        for request, handed in plan.begun.items():
            self.pushes.begin(request, handed)
        self.steps.begin(plan.shares)
        for request in plan.finished:
            self.pushes.finished(request)

    def start_pulls(self, plan: "PushPlan") -> None:
        if self.pulling is None or not (plan.pulls or plan.cancels):
            return
        fence = Fence(self._device)
        for request, pull in plan.pulls.items():
            self.pulling.begin(request, pull, fence)
        for request in plan.cancels:
            self.pulling.cancel(request)

    def take_sent(self) -> set[str]:
        return self.pushes.take_sent() if self.pushes is not None else set()

    def take_received(self) -> set[str]:
        """Requests that are not waited for any more; those of them that failed are in the next `take_failed`."""
        return self.pulling.take_received() if self.pulling is not None else set()

    def take_failed(self) -> dict[str, int]:
        """Request → how many of its first blocks came."""
        return self.pulling.take_failed() if self.pulling is not None else {}

    def close(self) -> None:
        """No copy of ours is under way any more, then nobody reaches us any more."""
        if self.steps is not None:
            self.steps.close()
        if self._copies is not None and not self._copies.close():
            logger.warning("A push is still under way; decode is told that nothing more comes all the same")
        if self._loop is not None:
            if self._registry is not None:
                self._loop.start(self._registry.cleanup()).result(_START_LIMIT)
            self._loop.close()
        if self._engine is not None:
            self._engine.close()
