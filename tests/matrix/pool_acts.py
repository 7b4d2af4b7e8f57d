"""Plays the acts of a history on a pool, and holds the four invariants against it."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.invariants.baseline import Baseline, pool_excess, settle
from tests.invariants.cast import Cast
from tests.invariants.history import judge, read
from tests.matrix.cells import (
    BATCH,
    DISK_FULL,
    GET,
    KILL,
    MASTER,
    MEMORY_FULL,
    PARTITION,
    PUT,
    READER,
    RESTART_OTHER,
    RESTART_SAME,
    SLOW,
    STOP_LONG,
    STOP_SHORT,
    WRITER,
    Act,
    History,
)
from tests.matrix.client import DATA, LONGEST_STOP
from tests.matrix.outcome import Outcome
from tests.matrix.pool import SLOW as SLOW_RATE
from tests.matrix.pool import TTL, Pool

AFTER = 1.2  # seconds of work when it is over
HEALING = 20.0  # seconds until everything works again
REMEMBERING = 5.0  # seconds until what living servers hold is known again
SETTLING = 12.0  # seconds until everything is given back
UNSURE = 1.5  # seconds before the death of a master in which a removal may be forgotten
HOLDS = {  # seconds, from and to
    KILL: (0.2, TTL + 1),
    STOP_SHORT: (0.2, 0.6 * TTL),
    STOP_LONG: (TTL + 0.5, TTL + 2.5),
    RESTART_SAME: (0.0, 0.0),
    RESTART_OTHER: (0.0, 0.0),
    PARTITION: (1.0, TTL + 2),
    SLOW: (1.5, 3.0),
    DISK_FULL: (1.5, 3.0),
    MEMORY_FULL: (1.5, 3.0),
}


def play(history: History, folder: Path) -> Outcome:
    """What this machine does not permit is skipped; raises if it permits no network namespaces and they are needed."""
    outcome = Outcome(history)
    cast = Cast()
    with cast.started(), ExitStack() as stack:
        pool = Pool(history, folder, cast, stack)
        player = _Player(pool, outcome)
        player.warm_up()
        for act in history.acts:
            player.act(act)
            if outcome.failures:
                break
        player.settle()
    outcome.fail(*(f"left running: {pid} {command}" for pid, command in cast.left().items()))
    calls = read(pool.notes)
    outcome.judged(judge(calls, player.unsure))
    return outcome


class _Player:
    def __init__(self, pool: Pool, outcome: Outcome) -> None:
        self.pool, self.outcome = pool, outcome
        self.unsure: list[tuple[float, float]] = []
        self.baseline: Baseline | None = None

    def warm_up(self) -> None:
        """Everybody meets everybody before it is noted what they hold."""
        for work in (PUT, GET, BATCH):
            self._tell_all(Act(MASTER, "", work, 0, 0, self.pool.history.seed), 0.7)
            self._hear_all("warm-up", 0.7)
        self.pool.probe.remove_all(force=True)
        self.baseline = Baseline(self.pool.processes())

    def act(self, act: Act) -> None:
        if act.fault == DISK_FULL and self.pool.why_no_full_disk:
            self.outcome.skipped.append(self.pool.why_no_full_disk)
            return
        low, high = HOLDS[act.fault]
        hold = low + act.hold * (high - low)
        seconds = act.before + hold + AFTER
        self.pool.plant()
        self._tell_all(act, seconds)
        time.sleep(act.before)
        with self._fault(act):
            time.sleep(hold)
        self._hear_all(str(act), seconds)
        self.outcome.fail(*(f"{act}: {name} died" for name in self.pool.cast.dead()))
        if not self.outcome.failures:
            self._heals(act)
            died = act.victim if act.fault in (KILL, RESTART_SAME, RESTART_OTHER) else ""
            self.outcome.fail(*(f"{act}: {text}" for text in self.pool.harvest(died, REMEMBERING)))
        self.outcome.cells.append((act.victim, act.fault, act.work))

    def settle(self) -> None:
        if self.outcome.failures:
            return
        if self.pool.probe.remove_all(force=True) < 0:
            self.outcome.fail("remove_all failed at the end")
        everything = settle(
            lambda: pool_excess(self.pool.master) + self.baseline.excess(self.pool.processes()), SETTLING
        )
        self.outcome.fail(*everything)

    @contextmanager
    def _fault(self, act: Act) -> Iterator[None]:
        pool, victim = self.pool, act.victim
        began = time.monotonic()
        with ExitStack() as undo:
            if act.fault in (STOP_SHORT, STOP_LONG):
                pool.stop(victim)
                undo.callback(pool.resume, victim)
            elif act.fault == PARTITION:
                undo.enter_context(pool.cut_off(victim))
            elif act.fault == SLOW:
                undo.enter_context(pool.slowed(victim))
            elif act.fault == DISK_FULL:
                pool.fill_disk()
                undo.callback(pool.free_disk)
            elif act.fault == MEMORY_FULL:
                pool.fill_memory()
                undo.callback(pool.free_memory)
            else:
                (pool.end if act.fault == RESTART_SAME else pool.kill)(victim)
                undo.callback(pool.start, victim, elsewhere=act.fault == RESTART_OTHER)
            yield
        if victim == MASTER and act.fault in (KILL, RESTART_SAME):
            self.unsure.append((began - UNSURE, time.monotonic()))

    def _heals(self, act: Act) -> None:
        began = time.monotonic()
        while not self.pool.whole():
            if time.monotonic() - began > HEALING:
                self.outcome.fail(f"{act}: the pool is not whole {HEALING:.0f} s later")
                return
            time.sleep(0.05)
        self.outcome.healed(str(act), time.monotonic() - began)

    def _tell_all(self, act: Act, seconds: float) -> None:
        rng = random.Random(act.seed)
        slow = 4 / SLOW_RATE if act.fault == SLOW else 0.0
        for role in (WRITER, READER):
            self.pool.tell(
                role,
                {"kind": act.work, "role": role, "seed": rng.randrange(1 << 30), "seconds": seconds,
                 "segments": self.pool.segments(), "seconds_a_byte": slow},
            )  # fmt: skip

    def _hear_all(self, what: str, seconds: float) -> None:
        for role in (WRITER, READER):
            if what.endswith(("SIGKILL", "address")) and f" {role}," in what:
                continue  # it was replaced, and its successor was not told anything
            answer = self.pool.hear(role, seconds + 2 * DATA + LONGEST_STOP)
            if answer is None:
                self.outcome.fail(f"{what}: {role} hangs or has ended", *self._stacks())
            else:
                self.outcome.fail(*(f"{what}: {role}: {late}" for late in answer["late"]))

    def _stacks(self) -> list[str]:
        texts = [path.read_text() for path in sorted(self.pool.folder.glob("*.stacks"))]
        return [text for text in texts if text]
