"""The state of transfers against random orders of events: every block that is said to be there was pushed after it was
computed, and every Ask ends once."""

from types import SimpleNamespace

import numpy as np
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake.vllm.push.copies import LEASE, Copied, Copies, Job, Receiver, clock
from mooncake.vllm.push.items import Handed, Share
from mooncake.vllm.push.pushes import Pushes, StepEnd
from mooncake.vllm.push.wire import Ask, Ended, Whole
from tests.push.instances import Counted

LAYERS, BLOCKS = 3, 5


class Held(Copies):
    """Copies that are made when the test says so."""

    def __init__(self) -> None:
        super().__init__(None, 3)  # moves nothing
        self._pool.shutdown()
        self.begun: list[Job] = []
        self._pool = SimpleNamespace(submit=lambda _, job: self.begun.append(job))


class Transfers(RuleBasedStateMachine):
    """One prompt of BLOCKS blocks, one decode.  The "bytes" of a block are the generation in which it was computed."""

    @initialize()
    def start(self) -> None:
        self.copies, self.counted = Held(), Counted()
        self.pushes = Pushes(self.copies, LAYERS, 60.0, self.counted)
        self.memory: dict[tuple[int, int], int] = {}  # (layer, source block) → generation
        self.target: dict[tuple[int, int], int] = {}  # (layer, target block) → generation
        self.generation = self.full = 0
        self.ends: list[StepEnd] = []
        self.untold: list[int] = []
        self.ended: list[str] = []
        self.asked = self.begun = self.finished = self.dropped = self.cancelled = False
        self.receiver = self._receiver()

    def _receiver(self) -> Receiver:
        route = SimpleNamespace(layers=np.arange(LAYERS), block_bytes=np.full(LAYERS, 16 << 20))
        receiver = Receiver("d", "session", route, self._hear)
        receiver.stamp = clock()
        return receiver

    def _hear(self, message: Ended | Whole) -> None:
        if isinstance(message, Ended):
            self.ended.append(message.reason)
            return
        assert 0 < message.blocks <= BLOCKS
        for layer in range(LAYERS):
            for block in range(message.blocks):
                assert self.target.get((layer, block), -2) >= 0, "a block was said to be whole that is not"

    def _source(self, block: int) -> int:
        return self.generation * 100 + block

    def _ask(self) -> None:
        blocks = np.arange(BLOCKS, dtype=np.int64).tobytes()
        self.pushes.ask(self.receiver, (0, 0), {(0, 0)}, Ask(1, "t", 0, blocks, 80, 0))
        self.asked = True

    # -- prefill's engine

    @precondition(lambda self: not self.begun)
    @rule()
    def begin(self) -> None:
        self.pushes.begin("p", Handed("t", 80, 0))
        self.begun = True

    @precondition(lambda self: self.begun and not self.ends and self.full < BLOCKS and not self.dropped)
    @rule(more=strategies.sampled_from((1, 2, BLOCKS, BLOCKS)))
    def begin_step(self, more: int) -> None:
        first, self.full = self.full, min(BLOCKS, self.full + more)
        new = [self._source(block) for block in range(first, self.full)]
        self.ends = self.pushes.step([Share("p", new, self.full)])
        self.untold = list(range(LAYERS))

    @precondition(lambda self: self.ends)
    @rule(count=strategies.sampled_from((1, LAYERS, LAYERS)))
    def compute_layers(self, count: int) -> None:
        done, self.untold = self.untold[:count], self.untold[count:]
        for layer in done:
            for block in range(self.full):
                self.memory[layer, self._source(block)] = self.generation
        self.pushes.computed(self.ends, np.array(done))
        if not self.untold:
            self.ends = []

    @precondition(lambda self: self.begun and not self.ends and not self.finished and self.full)
    @rule()
    def preempt(self) -> None:
        """Its blocks are somebody else's until it is computed again."""
        self.pushes.preempted("p")
        for key in self.memory:
            self.memory[key] = -1
        self.generation += 1
        self.full = 0

    @precondition(lambda self: self.full == BLOCKS and not self.ends and not self.finished and not self.dropped)
    @rule()
    def finish(self) -> None:
        self.pushes.finished("p")
        self.finished = True

    @precondition(lambda self: self.begun and not self.finished and not self.dropped and not self.ends)
    @rule(chance=strategies.integers(0, 4))
    def drop(self, chance: int) -> None:
        if not chance:
            self.pushes.dropped("t", "it was aborted")
            self.dropped = True

    # -- decode

    @precondition(lambda self: not self.asked)
    @rule()
    def ask(self) -> None:
        self._ask()

    @precondition(lambda self: self.asked)
    @rule(chance=strategies.integers(0, 4))
    def cancel(self, chance: int) -> None:
        if not chance:
            self.cancelled = True
            self.pushes.cancel(self.receiver, 1)

    @precondition(lambda self: self.asked)
    @rule(chance=strategies.integers(0, 4))
    def connect_again(self, chance: int) -> None:
        """The Ask comes once more, over another connection; its end may be said once more."""
        if chance:
            return
        told = list(self.ended)
        self.pushes.lost(self.receiver)
        self.receiver = self._receiver()
        self._ask()
        if told:
            assert self.ended == [*told, told[-1]]
            self.ended = told

    @rule(chance=strategies.integers(0, 9))
    def lease(self, chance: int) -> None:
        valid = bool(chance)
        self.receiver.stamp = clock() if valid else clock() - 2 * LEASE
        with self.copies.lock:
            self.copies.feed(self.receiver)

    # -- copies

    @precondition(lambda self: self.copies.begun)
    @rule(which=strategies.integers(0, 10), chance=strategies.integers(0, 19), again=strategies.booleans())
    def copy(self, which: int, chance: int, again: bool = False) -> None:
        job = self.copies.begun.pop(which % len(self.copies.begun))

        def move(_job: Job) -> Copied:
            for layer in job.layers.tolist():
                for source, target in zip(job.ours.tolist(), job.theirs.tolist(), strict=True):
                    assert not self.ended, "it was written after the end"
                    self.target[layer, target] = self.memory.get((layer, source), -2)
            return Copied(0.0, 1, 1, "" if chance else "made to fail")

        self.copies._copy = move
        self.copies._run(job)
        if again and self.copies.begun:
            self.copy(which, 1, again)

    # -- what must hold

    @invariant()
    def ends_once_and_whole(self) -> None:
        assert len(self.ended) <= 1
        if self.ended == [""]:
            expected = {(layer, block): self.generation for layer in range(LAYERS) for block in range(BLOCKS)}
            assert self.target == expected or self.was_whole, (self.target, expected)
            self.was_whole = True

    was_whole = False

    def teardown(self) -> None:
        """Once everything goes on, everything ends."""
        if not hasattr(self, "copies"):
            return
        if not self.asked:
            self._ask()
        if not self.begun:
            self.begin()
        if self.ends:
            self.compute_layers(LAYERS)
        if not self.dropped and not self.finished:
            if self.full < BLOCKS:
                self.begin_step(BLOCKS)
                self.compute_layers(LAYERS)
            self.finish()
        self.lease(1)
        for _ in range(200):
            if not self.copies.begun:
                break
            self.copy(0, 1)
        self.ends_once_and_whole()
        assert len(self.ended) == 1
        assert not self.pushes._asks
        assert not self.pushes._transfers
        assert self.pushes.take_sent() == ({"p"} if self.finished else set())


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


def scenario() -> Transfers:
    """Decode has asked, and one step's jobs have begun."""
    machine = Transfers()
    machine.start()
    machine.begin()
    machine.ask()
    machine.begin_step(BLOCKS - 1)
    machine.compute_layers(LAYERS)
    assert machine.copies.begun
    return machine


def test_copies_of_before_a_preemption_come_first_or_not_at_all():
    machine = scenario()
    first = machine.copies.begun[:]
    machine.preempt()
    machine.begin_step(BLOCKS)
    machine.compute_layers(LAYERS)
    assert machine.copies.begun == first  # the new ones wait for these
    machine.teardown()
    assert machine.ended == [""]


def test_steps_of_before_a_preemption_make_nothing_ready():
    machine = scenario()
    late, machine.ends = machine.pushes.step([Share("p", [machine._source(BLOCKS - 1)], BLOCKS)]), []
    machine.preempt()
    machine.begin_step(1)
    machine.pushes.computed(late, np.arange(LAYERS))  # the GPU was late
    machine.compute_layers(LAYERS)
    machine.teardown()
    assert machine.ended == [""]


def test_nothing_is_copied_without_a_lease_or_after_the_end():
    machine = scenario()
    jobs = len(machine.copies.begun)
    machine.receiver.stamp = clock() - LEASE - 1
    for _ in range(jobs):
        machine.copy(0, 1)
    assert not machine.target
    assert not machine.copies.begun
    machine.cancel(0)
    assert machine.ended == ["decode does not want it any more"]
    machine.lease(1)
    assert not machine.copies.begun
    machine.teardown()
    assert not machine.target
