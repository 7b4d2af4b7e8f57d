"""P/D requests through the proxy to stub engines while one of them, or the proxy itself, is hurt.

What a client has seen is always the beginning of what one undisturbed engine says, and all of it unless it was told of
an error; a connection may be cut only by the death of the proxy.
"""

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.hosts import Hosts
from tests.invariants.baseline import Baseline, settle
from tests.invariants.cast import Cast
from tests.matrix.cells import (
    DECODE,
    KILL,
    OF_NETWORKS,
    PARTITION,
    PREFILL,
    PROXY,
    REQUESTS_HOSTS,
    RESTART_OTHER,
    RESTART_SAME,
    SLOW,
    STOP_LONG,
    STOP_SHORT,
    Act,
    History,
)
from tests.matrix.outcome import Outcome
from tests.processes import stop
from tests.proxy.processes import Engine, Proxy, Streamed, expected, greedy, greedy_chat, stream

CLIENTS = 6
FLAGS = {
    "connect-timeout": 1,
    "first-byte-timeout": 3,
    "chunk-timeout": 3,
    "response-timeout": 8,
    "prefill-timeout": 3,
    "wait-timeout": 4,
    "health-interval": 0.3,
    "health-timeout": 1,
    "health-failures": 2,
}
EJECTED = 2.6  # seconds, at most, until a silent instance is known to be
LIMIT = 2 * (FLAGS["wait-timeout"] + FLAGS["prefill-timeout"] + FLAGS["response-timeout"])  # it is tried twice
HEALING = 15.0
SETTLING = 20.0  # kept connections end after 15 s
RATE = 64 << 10  # bytes a second of a slow link
HOLDS = {KILL: (0.2, 3.0), STOP_SHORT: (0.2, 0.8), STOP_LONG: (EJECTED + 0.5, EJECTED + 2.5),
         RESTART_SAME: (0.0, 0.0), RESTART_OTHER: (0.0, 0.0), PARTITION: (0.5, EJECTED + 2), SLOW: (1, 3)}  # fmt: skip


def host_of(role: str, which: int) -> int:
    """The number of the host of a process, where each has one of its own."""
    return {PROXY: 0, PREFILL: 1, DECODE: 3}[role] + which


class _Deployment:
    def __init__(self, history: History, cast: Cast, stack: ExitStack) -> None:
        self.cast, self._stack, self._straight = cast, stack, history.tcp
        self._replaced: list[tuple[str, Engine, Engine]] = []
        self.hosts = Hosts(5, reachable=True) if history.scene == REQUESTS_HOSTS else None  # the proxy's is the first
        if self.hosts is not None:
            stack.callback(self.hosts.close)
        self.engines: dict[str, list[Engine]] = {
            role: [self._engine(host_of(role, which)) for which in range(2)] for role in (PREFILL, DECODE)
        }
        flags = [f"--{name}={value}" for name, value in FLAGS.items()]
        prefill = [(engine, self._straight) for engine in self.engines[PREFILL]]
        self.proxy = Proxy(*flags, prefill=prefill, decode=self.engines[DECODE], **self._at(host_of(PROXY, 0)))
        stack.callback(self.proxy.stop)
        self._enroll()

    def _at(self, host: int) -> dict[str, Any]:
        return {} if self.hosts is None else {"host": self.hosts.addresses[host], "prefix": self.hosts.inside(host)}

    def _engine(self, host: int) -> Engine:
        engine = Engine(**self._at(host))
        self._stack.callback(engine.stop)
        engine.control(gap_ms=4.0)
        return engine

    def processes(self) -> dict[str, int]:
        found = {PROXY: self.proxy.process.pid}
        for role, engines in self.engines.items():
            found |= {f"{role} {i}": engine.process.pid for i, engine in enumerate(engines)}
        return found

    def _enroll(self) -> None:
        for name, pid in self.processes().items():
            self.cast.add(name, pid)

    def busy(self) -> list[str]:
        return [
            f"{role} has {active} requests"
            for role, engines in self.engines.items()
            for engine in engines
            if (active := engine.seen()["active"])
        ]

    def well(self) -> bool:
        try:
            return self.proxy.is_ready() and self.proxy.ask(greedy(3))[0] == 200
        except OSError:
            return False

    # -- what happens to it

    def kill(self, victim: Proxy | Engine) -> None:
        self.cast.kill(victim.process.pid)
        victim.process.wait()

    def end(self, victim: Proxy | Engine) -> None:
        self.cast.leaves(victim.process.pid)
        victim.stop()

    def start(self, victim: Proxy | Engine) -> None:
        victim.start()
        if isinstance(victim, Engine):
            victim.control(gap_ms=4.0)
        else:
            for role, old, new in self._replaced:
                self._change(role, old, new)
        self._enroll()

    def replace(self, role: str, which: int) -> None:
        """Another one at another address, in the place of one that is dead."""
        old, new = self.engines[role][which], self._engine(host_of(role, which))
        self._change(role, old, new)
        self._replaced.append((role, old, new))  # a proxy that is started again does not know of it
        self.engines[role][which] = new
        self._enroll()

    def _change(self, role: str, old: Engine, new: Engine) -> None:
        more = {"bootstrap_port": new.bootstrap_port} if role == PREFILL and self._straight else {}
        assert self.proxy.change("add", role, new, **more)[0] == 200
        assert self.proxy.change("remove", role, old)[0] == 200


def play(history: History, _: Path) -> Outcome:
    outcome = Outcome(history)
    cast = Cast()
    with cast.started(), ExitStack() as stack:
        deployment = _Deployment(history, cast, stack)
        _load(deployment, outcome, Act(PROXY, "", "", 0, 0, history.seed), 1.0, None)
        baseline = Baseline(deployment.processes(), kept=2 * CLIENTS)
        for act in history.acts:
            _play(deployment, outcome, act)
            outcome.fail(*(f"{act}: {name} died" for name in cast.dead()))
            outcome.cells.append((act.victim, act.fault, act.work))
            if outcome.failures:
                return outcome
        excess = settle(lambda: deployment.busy() + baseline.excess(deployment.processes()), SETTLING)
        outcome.fail(*excess)
        for pid in deployment.processes().values():
            cast.leaves(pid)
    outcome.fail(*(f"left running: {pid} {command}" for pid, command in cast.left().items()))
    return outcome


def _play(deployment: _Deployment, outcome: Outcome, act: Act) -> None:
    low, high = HOLDS[act.fault]
    hold = low + act.hold * (high - low)
    which = random.Random(act.seed).randrange(2)
    _load(deployment, outcome, act, act.before + hold + 1.0, lambda: _fault(deployment, act, which, hold))
    began = time.monotonic()
    while not deployment.well():
        if time.monotonic() - began > HEALING:
            outcome.fail(f"{act}: not well {HEALING:.0f} s later")
            return
        time.sleep(0.05)
    outcome.healed(str(act), time.monotonic() - began)


def _fault(deployment: _Deployment, act: Act, which: int, hold: float) -> None:
    with _hurt(deployment, act, which):
        time.sleep(hold)


@contextmanager
def _hurt(deployment: _Deployment, act: Act, which: int) -> Iterator[None]:
    victim = deployment.proxy if act.victim == PROXY else deployment.engines[act.victim][which]
    if act.fault in (STOP_SHORT, STOP_LONG):
        stop(victim.process.pid)
        try:
            yield
        finally:
            victim.signal(signal.SIGCONT)
        return
    if act.fault in OF_NETWORKS:
        host = host_of(act.victim, 0 if act.victim == PROXY else which)
        with deployment.hosts.cut_off(host) if act.fault == PARTITION else deployment.hosts.slowed(host, RATE):
            yield
        return
    (deployment.end if act.fault == RESTART_SAME else deployment.kill)(victim)
    yield
    if act.fault == RESTART_OTHER:
        deployment.replace(act.victim, which)
    else:
        deployment.start(victim)


def _load(
    deployment: _Deployment, outcome: Outcome, act: Act, seconds: float, fault: Callable[[], None] | None
) -> None:
    """Requests of several clients at once for so long, and `fault` after a while beside them."""

    async def run() -> None:
        end = time.monotonic() + seconds
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            clients = [
                _client(deployment, outcome, act, random.Random(act.seed * 100 + i), end, session)
                for i in range(CLIENTS)
            ]
            await asyncio.gather(_after(act.before, fault), *clients)

    asyncio.run(run())


async def _after(seconds: float, fault: Callable[[], None] | None) -> None:
    if fault is not None:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(fault)


async def _client(
    deployment: _Deployment, outcome: Outcome, act: Act, rng: random.Random, end: float, session: aiohttp.ClientSession
) -> None:
    while time.monotonic() < end:
        prompt = f"prompt {rng.randrange(1 << 30)}"
        count = rng.randrange(3, 60)
        body = greedy_chat(count, prompt) if rng.random() < 0.5 else greedy(count, prompt)
        name = "stream" if rng.random() < 0.7 else "whole"
        ask = _streamed if name == "stream" else _whole
        began = time.monotonic()
        try:
            code, why = await asyncio.wait_for(ask(deployment.proxy.url, body, session), LIMIT + EJECTED + 3)
        except TimeoutError:
            code, why = "hang", f"it has not ended within {LIMIT + EJECTED + 3:.0f} s"
        took = time.monotonic() - began
        outcome.calls += 1
        outcome.gets += 1
        outcome.codes[f"{name}:{code}"] += 1
        outcome.slowest[name] = max(took, outcome.slowest.get(name, 0.0))
        if code == "cut" and not (act.victim == PROXY and act.fault in (KILL, RESTART_SAME, PARTITION)):
            why = why or "the connection was cut, and the proxy lives"
        if why:
            outcome.fail(f"{act}: {name} of {body}: {why}")
            return
        if code == "cut":
            await asyncio.sleep(0.05)


async def _streamed(url: str, body: dict, session: aiohttp.ClientSession) -> tuple[str, str]:
    """(how it ended, what was wrong with it)."""
    answer: Streamed = await stream(url, body, session)
    right = expected(body)
    if not right.startswith(answer.text):
        return "wrong", f"{answer.text!r} is not the beginning of {right!r}"
    if answer.cut:
        return "cut", ""
    if answer.status != 200:
        return str(answer.status), "" if answer.status >= 500 else f"status {answer.status}"
    if answer.error is not None:
        return "error", ""
    whole = answer.text == right and answer.done and answer.finish == ["length"]
    return "200", "" if whole else f"it ended after {answer.text!r} of {right!r} as if it were whole"


async def _whole(url: str, body: dict, session: aiohttp.ClientSession) -> tuple[str, str]:
    chat = "messages" in body
    try:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        async with session.post(url + path, json=body) as response:
            status, answer = response.status, await response.json()
    except aiohttp.ClientError:
        return "cut", ""
    if status != 200:
        return str(status), "" if status >= 500 else f"status {status}: {answer}"
    choice = answer["choices"][0]
    text = choice["message"]["content"] if chat else choice["text"]
    return "200", "" if text == expected(body) else f"{text!r} is not {expected(body)!r}"
