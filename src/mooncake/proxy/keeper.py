"""Keeps the fleet up to date: health checks, bootstrap queries, adding and draining instances.

An instance is looked at every interval, at once after a request failed there, and often while it is ejected.  A refused
connection or an error status ejects at once; silence only when it repeats, since a busy engine may be slow to answer.
"""

import asyncio
import logging
import ssl

import aiohttp
import msgspec

from mooncake.proxy.config import ProxyConfig
from mooncake.proxy.handoff import is_straight
from mooncake.proxy.instances import Fleet, Instance, Role, State
from mooncake.security.https import aiohttp_tls

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.05
_AFTER_FORCED_S = 5.0


class _Engine(msgspec.Struct):
    engine_id: str


class _Unwell(Exception):
    """The instance says itself, or its host does, that it cannot serve."""


class Keeper:
    def __init__(self, config: ProxyConfig, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._config, self._fleet, self._session = config, fleet, session
        self._checks = config.health
        self._watches: dict[Instance, asyncio.Task[None]] = {}
        self._drains: dict[Instance, asyncio.Task[None]] = {}

    def add(self, instance: Instance) -> None:
        self._fleet.add(instance)
        self._watches[instance] = asyncio.create_task(self._watch(instance))

    def take_back(self, instance: Instance) -> None:
        """An instance that was being removed stays."""
        self._drains.pop(instance).cancel()
        instance.state = State.STARTING
        instance.look_now.set()

    def remove(self, instance: Instance) -> None:
        """No new requests; gone when it is idle, or at the limit."""
        if instance.state is not State.DRAINING:
            instance.state = State.DRAINING
            self._drains[instance] = asyncio.create_task(self._drain(instance))

    async def close(self) -> None:
        tasks = [*self._watches.values(), *self._drains.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, instance: Instance) -> None:
        if not await _idle(instance, self._config.limits.drain_s):
            instance.lose_dependents(forced=True)
            await _idle(instance, _AFTER_FORCED_S)
        self._watches.pop(instance).cancel()
        self._fleet.discard(instance)
        self._drains.pop(instance, None)

    async def _watch(self, instance: Instance) -> None:
        while True:
            instance.look_now.clear()
            await self._look(instance)
            ready = instance.state is State.READY
            try:
                async with asyncio.timeout(self._checks.interval_s if ready else self._checks.ejected_interval_s):
                    await instance.look_now.wait()
            except TimeoutError:
                pass

    async def _look(self, instance: Instance) -> None:
        try:
            async with asyncio.timeout(self._checks.timeout_s):
                await self._fetch(instance.path("/health"))
                if instance.role is Role.PREFILL and is_straight(instance, self._config.connector):
                    self._note_engines(instance, await self._engines(instance))
        except (_Unwell, aiohttp.ClientConnectorError) as error:
            self._fleet.failed(instance, f"health check: {error}", 1)
        except TimeoutError:
            why = f"health check: no answer within {self._checks.timeout_s:g} s"
            self._fleet.failed(instance, why, self._checks.failures)
        except (aiohttp.ClientError, OSError) as error:
            self._fleet.failed(instance, f"health check: {error}", self._checks.failures)
        else:
            self._fleet.passed(instance, self._checks.successes)

    def _note_engines(self, instance: Instance, engines: list[tuple[int, str]]) -> None:
        before, instance.engines = instance.engines, engines
        if before and before != engines:
            logger.info("%s instance %s was restarted: it has new engine ids", instance.role, instance.url)
            instance.lose_dependents()  # decode halves wait for what the engine that is gone would have sent

    async def _fetch(self, url: object, tls: ssl.SSLContext | bool = True) -> bytes:
        """`tls`: for an HTTPS server of the cluster, not of vLLM."""
        async with self._session.get(str(url), ssl=tls) as response:
            if response.status != 200:
                raise _Unwell(f"{url} answered {response.status}")
            return await response.read()

    async def _engines(self, instance: Instance) -> list[tuple[int, str]]:
        """What the bootstrap server knows; asked every time, since a restarted engine has a new id."""
        url = f"{instance.bootstrap}/query"
        try:
            found = msgspec.json.decode(await self._fetch(url, aiohttp_tls()), type=dict[int, _Engine])
        except msgspec.DecodeError as error:
            raise _Unwell(f"{url} gave no engine ids ({error})") from None
        if not found:
            raise _Unwell(f"{url} knows no engine yet")
        return sorted((rank, engine.engine_id) for rank, engine in found.items())


async def _idle(instance: Instance, limit_s: float) -> bool:
    """Wait until nothing is in flight; whether that came true within the limit."""
    try:
        async with asyncio.timeout(limit_s):
            while instance.in_flight:
                await asyncio.sleep(_DRAIN_POLL_S)
    except TimeoutError:
        return False
    return True
