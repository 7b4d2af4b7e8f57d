"""The instances behind the proxy: their states, and what is in flight on each.

    STARTING ──healthy──► READY ◄──healthy again── EJECTED
                            │ ────unreachable────────►
    any ──remove──► DRAINING ──idle, or its limit──► gone

Only READY instances get requests.  `Fleet` owns the instances; health checks and requests report to it what they saw.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from yarl import URL

from mooncake.proxy.metrics import Metrics
from mooncake.security.tls_files import scheme

if TYPE_CHECKING:
    from mooncake.proxy.policies import Policy

logger = logging.getLogger(__name__)


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    EJECTED = "ejected"
    DRAINING = "draining"


class Prompt(NamedTuple):
    """What a choice may depend on: how the prompt begins, and how many of its tokens instances are known to have, by
    their URLs."""

    key: bytes = b""
    matched: Mapping[str, int] = MappingProxyType({})


ANY = Prompt()


class Dependent(Protocol):
    """A request that needs an instance to go on."""

    def lose(self, instance: "Instance", *, forced: bool) -> None:
        """The instance is out of reach: go on elsewhere if that is possible (`forced`: or end)."""


class Instance:
    """One engine."""

    def __init__(self, role: Role, url: str, bootstrap_port: int | None = None) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self.name = self.url.encode()
        self.bootstrap_port = bootstrap_port
        self.state = State.STARTING
        self.in_flight = 0
        self.served = 0
        self.failures = 0
        self.failed_checks = 0  # in a row
        self.passed_checks = 0  # in a row
        self.last_error = ""
        self.dependents: set[Dependent] = set()
        self.look_now = asyncio.Event()  # asks for a health check at once
        self.engines: list[tuple[int, str]] = []  # of the bootstrap server: (data-parallel rank, engine id)
        self._turn = 0
        self._paths: dict[str, URL] = {}

    def path(self, path: str) -> URL:
        url = self._paths.get(path)
        if url is None:
            url = self._paths[path] = URL(self.url + path)
        return url

    @property
    def bootstrap(self) -> str:
        """Base URL of the bootstrap server."""
        host = URL(self.url).host or ""
        return f"{scheme()}://{f'[{host}]' if ':' in host else host}:{self.bootstrap_port}"

    def next_engine(self) -> tuple[int, str]:
        """Data-parallel ranks take turns."""
        self._turn += 1
        return self.engines[self._turn % len(self.engines)]

    def lose_dependents(self, *, forced: bool = False) -> None:
        for dependent in list(self.dependents):
            dependent.lose(self, forced=forced)


class Fleet:
    """All instances of both roles."""

    def __init__(self, policy: "Callable[[], Policy]", metrics: Metrics) -> None:
        self._instances: dict[Role, list[Instance]] = {role: [] for role in Role}
        self._policies = {role: policy() for role in Role}
        self._metrics = metrics
        self._available = asyncio.Condition()
        self._waking: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Instance]:
        for instances in self._instances.values():
            yield from instances

    def of(self, role: Role) -> Sequence[Instance]:
        return self._instances[role]

    def ready(self, role: Role) -> list[Instance]:
        return [instance for instance in self._instances[role] if instance.state is State.READY]

    def least_loaded(self, role: Role) -> Instance | None:
        return min(self.ready(role), key=lambda instance: instance.in_flight, default=None)

    def find(self, role: Role, url: str) -> Instance | None:
        return next((one for one in self._instances[role] if one.url == url.rstrip("/")), None)

    def add(self, instance: Instance) -> None:
        self._instances[instance.role].append(instance)
        logger.info("%s instance %s was added", instance.role, instance.url)

    def discard(self, instance: Instance) -> None:
        if instance in self._instances[instance.role]:
            self._instances[instance.role].remove(instance)
            self._metrics.forget(instance.role, instance.url)
            logger.info("%s instance %s was removed", instance.role, instance.url)

    # ------------------------------------------------------------ choosing

    def choose(self, role: Role, prompt: Prompt, avoid: set[Instance]) -> Instance | None:
        """An available instance, rather one that is not in `avoid`; None if none is available."""
        ready = self.ready(role)
        fresh = [instance for instance in ready if instance not in avoid] if avoid else ready
        if not (fresh or ready):
            return None
        return self._policies[role].choose(fresh or ready, prompt)

    async def wait_and_choose(
        self, role: Role, prompt: Prompt, avoid: set[Instance], limit_s: float
    ) -> Instance | None:
        """As `choose`, but waits for an instance to become available."""
        chosen = self.choose(role, prompt, avoid)
        if chosen is not None:
            return chosen
        try:
            async with asyncio.timeout(limit_s), self._available:
                while (chosen := self.choose(role, prompt, avoid)) is None:
                    await self._available.wait()
        except TimeoutError:
            return None
        return chosen

    # ------------------------------------------------------------ what was seen of an instance

    def passed(self, instance: Instance, needed: int) -> None:
        """A health check found it well; `needed` of them in a row make it available."""
        instance.failed_checks = 0
        instance.passed_checks += 1
        if instance.state in (State.STARTING, State.EJECTED) and instance.passed_checks >= needed:
            instance.state = State.READY
            logger.info("%s instance %s is available", instance.role, instance.url)
            task = asyncio.create_task(self._wake())
            self._waking.add(task)
            task.add_done_callback(self._waking.discard)

    def failed(self, instance: Instance, why: str, allowed: int) -> None:
        """A health check failed; `allowed` of them in a row eject it."""
        instance.passed_checks = 0
        instance.failed_checks += 1
        instance.last_error = why
        if instance.failed_checks >= allowed:
            self.eject(instance, why)

    def suspect(self, instance: Instance, why: str) -> None:
        """A request failed there: have a look at once."""
        instance.failures += 1
        instance.last_error = why
        instance.look_now.set()

    def eject(self, instance: Instance, why: str) -> None:
        """No more requests until it is well again; those that can go on elsewhere do."""
        instance.passed_checks = 0
        instance.last_error = why
        if instance.state is State.READY:
            instance.state = State.EJECTED
            self._metrics.ejections.labels(instance.role, instance.url).inc()
            logger.warning("%s instance %s is ejected: %s", instance.role, instance.url, why)
            instance.lose_dependents()

    async def _wake(self) -> None:
        async with self._available:
            self._available.notify_all()
