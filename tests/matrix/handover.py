"""Prompts handed over from a prefill to a decode instance, real workers with KV caches in numpy memory; one is hurt.

Each block says whose it is.  What decode was told has come is right; blocks of a handover that has ended are somebody
else's from then on, and stay so whatever prefill does later; and prefill lets go of every prompt.
"""

import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mooncake.vllm.push.wire import LEASE, SILENCE
from tests.hosts import Hosts
from tests.invariants.baseline import Baseline, settle
from tests.invariants.cast import Cast
from tests.matrix.cells import (
    DECODE,
    HANDOVER_HOSTS,
    KILL,
    PARTITION,
    PREFILL,
    RESTART_OTHER,
    RESTART_SAME,
    SLOW,
    STOP_LONG,
    STOP_SHORT,
    Act,
    History,
)
from tests.matrix.outcome import Outcome
from tests.processes import free_port, stop
from tests.push.instance_process import RemoteInstance
from tests.push.memory import BLOCK

BLOCKS, HALF = 12, 5  # of a prompt, and those that are computed before something happens
OVERLAPPING = 2  # handovers under way when it does
TAKEN = 700  # what blocks are called that are somebody else's
LIMIT = 2 * (SILENCE + LEASE) + 5  # seconds until a handover has ended on either side
RATE = 32 << 10  # bytes a second of a slow link
HOLDS = {
    KILL: (0.2, 2.0),
    STOP_SHORT: (0.2, 2.0),
    STOP_LONG: (SILENCE + 0.5, SILENCE + LEASE),
    RESTART_SAME: (0.0, 0.0),
    RESTART_OTHER: (0.0, 0.0),
    PARTITION: (1.0, SILENCE + LEASE),
    SLOW: (1.0, 3.0),
}
ROLES = (PREFILL, DECODE)


@dataclass
class Handover:
    name: str
    source: list[int]
    target: list[int]
    called: int


class _Pair:
    def __init__(self, history: History, cast: Cast, stack: ExitStack) -> None:
        self.cast, self._stack = cast, stack
        self.hosts = Hosts(2, reachable=True) if history.scene == HANDOVER_HOSTS else None
        if self.hosts is not None:
            stack.callback(self.hosts.close)
        self.ports = {role: free_port() for role in ROLES}
        self.instances: dict[str, RemoteInstance] = {}
        for role in ROLES:
            self.start(role)
        self._number = 0
        self._rng = random.Random(history.seed)

    def start(self, role: str, elsewhere: bool = False) -> None:
        if elsewhere:
            self.ports[role] = free_port()
        i = ROLES.index(role)
        host = "127.0.0.1" if self.hosts is None else self.hosts.addresses[i]
        prefix = [] if self.hosts is None else self.hosts.inside(i)
        made = self.instances[role] = RemoteInstance(role, host, limit=20, port=self.ports[role], prefix=prefix)
        self._stack.callback(made.stop)
        self.cast.add(role, made.process.pid)

    @property
    def prefill(self) -> RemoteInstance:
        return self.instances[PREFILL]

    @property
    def decode(self) -> RemoteInstance:
        return self.instances[DECODE]

    def processes(self) -> dict[str, int]:
        return {role: made.process.pid for role, made in self.instances.items()}

    # -- a handover

    def make(self, taken: set[int] | None = None) -> Handover:
        """A new one, in blocks that are not in `taken`; they are then."""
        taken = set() if taken is None else taken
        self._number += 1
        free = [block for block in range(64) if block not in taken]
        target = self._rng.sample(free, BLOCKS)
        source = self._rng.sample(free, BLOCKS)
        taken |= {*target, *source}
        return Handover(f"h{self._number}", source, target, 1 + self._number * BLOCKS % 600)

    def begin(self, what: Handover) -> None:
        self.decode.pull(what.name, what.name, self.prefill, what.target)
        self.prefill.do("begin", what.name, what.name, BLOCKS * BLOCK)
        self.prefill.do("compute_called", what.name, what.source, what.called, 0, HALF)

    def finish(self, what: Handover) -> None:
        """Told only: a prefill that is stopped answers later."""
        self.prefill.tell("compute_called", what.name, what.source, what.called, HALF, BLOCKS)
        self.prefill.tell("finish", what.name)

    def heard(self, count: int) -> None:
        for _ in range(2 * count):
            self.prefill.hear()

    def result(self, what: Handover) -> int | None:
        """As `result` of an instance; None also if it is not known within the limit."""
        end = time.monotonic() + LIMIT
        while (came := self.decode.do("result", what.name)) is None and time.monotonic() < end:
            time.sleep(0.02)
        return came

    def lets_go(self, what: Handover) -> bool:
        end = time.monotonic() + LIMIT
        while not (gone := self.prefill.do("has_let_go", what.name)) and time.monotonic() < end:
            time.sleep(0.02)
        return gone


def play(history: History, _: Path) -> Outcome:
    outcome = Outcome(history)
    cast = Cast()
    with cast.started(), ExitStack() as stack:
        pair = _Pair(history, cast, stack)
        _undisturbed(pair, outcome, "warm-up")
        baseline = Baseline(pair.processes())
        for act in history.acts:
            if outcome.failures:
                break
            _undisturbed(pair, outcome, str(act))
            _play(pair, outcome, act)
            outcome.fail(*(f"{act}: {name} died" for name in cast.dead()))
            outcome.cells.append((act.victim, act.fault, act.work))
        if not outcome.failures:
            outcome.fail(*settle(lambda: baseline.excess(pair.processes()), 12.0))
        for pid in pair.processes().values():
            cast.leaves(pid)
    outcome.fail(*(f"left running: {pid} {command}" for pid, command in cast.left().items()))
    return outcome


def _undisturbed(pair: _Pair, outcome: Outcome, what: str) -> None:
    """A handover that must come whole; again for a while, since an instance that has just come back may not be
    known yet."""
    began = time.monotonic()
    while True:
        one = pair.make()
        pair.begin(one)
        pair.finish(one)
        pair.heard(1)
        came = _judge(pair, outcome, what, one)
        if not pair.lets_go(one):
            outcome.fail(f"{what}: prefill does not let go of {one.name}")
        if came == -1 or outcome.failures:
            outcome.healed(what, time.monotonic() - began)
            return
        if time.monotonic() - began > LIMIT:
            outcome.fail(f"{what}: nothing is handed over {LIMIT:.0f} s later")
            return


def _judge(pair: _Pair, outcome: Outcome, what: str, one: Handover) -> int | None:
    """How many blocks came; they are right."""
    began = time.monotonic()
    came = pair.result(one)
    outcome.calls += 1
    outcome.slowest["handover"] = max(time.monotonic() - began, outcome.slowest.get("handover", 0.0))
    outcome.codes[
        "handover:" + ("whole" if came == -1 else "hang" if came is None else "part" if came else "none")
    ] += 1
    if came is None:
        outcome.fail(f"{what}: {one.name} has not ended at decode within {LIMIT:.0f} s")
    else:
        there = BLOCKS if came == -1 else came
        outcome.gets += there
        why = pair.decode.do("wrong", one.target[:there], one.called)
        if why:
            outcome.fail(f"{what}: {one.name}: {why}")
    return came


def _play(pair: _Pair, outcome: Outcome, act: Act) -> None:
    low, high = HOLDS[act.fault]
    hold = low + act.hold * (high - low)
    taken: set[int] = set()
    under_way = [pair.make(taken) for _ in range(OVERLAPPING)]
    for one in under_way:
        pair.begin(one)
    time.sleep(act.before)
    with _fault(pair, act):
        lives = act.fault not in (KILL, RESTART_SAME, RESTART_OTHER)
        if lives or act.victim == DECODE:
            for one in under_way:
                pair.finish(one)
        time.sleep(hold)
    if lives or act.victim == DECODE:
        pair.heard(len(under_way))
    if lives or act.victim == PREFILL:
        for one in under_way:
            if _judge(pair, outcome, str(act), one) is not None:
                pair.decode.do("take", one.target, TAKEN)
    if lives or act.victim == DECODE:
        for one in under_way:
            if not pair.lets_go(one):
                outcome.fail(f"{act}: prefill does not let go of {one.name}")
    if lives or act.victim == PREFILL:
        for one in under_way:
            why = pair.decode.do("wrong", one.target, TAKEN)
            if why:
                outcome.fail(f"{act}: written after {one.name} had ended: {why}")


@contextmanager
def _fault(pair: _Pair, act: Act) -> Iterator[None]:
    victim, host = pair.instances[act.victim], ROLES.index(act.victim)
    pid = victim.process.pid
    if act.fault == PARTITION:
        with pair.hosts.cut_off(host):
            yield
    elif act.fault == SLOW:
        with pair.hosts.slowed(host, RATE):
            yield
    elif act.fault in (STOP_SHORT, STOP_LONG):
        stop(pid)
        yield
        victim.process.send_signal(signal.SIGCONT)
    else:
        if act.fault == RESTART_SAME:
            pair.cast.leaves(pid)
        else:
            pair.cast.kill(pid)
        victim.stop()
        yield
        pair.start(act.victim, elsewhere=act.fault == RESTART_OTHER)
