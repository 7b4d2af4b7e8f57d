"""The allocator and the slots of a segment against a set of taken granules."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mooncake.master.allocator import PAGE, Allocator
from mooncake.master.slots import Slots
from mooncake.transfer.table import GRANULE

SIZE = 9 * 4096 * GRANULE + 5 * PAGE + 3 * GRANULE  # a few regions, and an odd end
sizes = st.one_of(
    st.integers(1, 3 * GRANULE),
    st.integers(1, 40).map(lambda pages: pages * PAGE),
    st.integers(1, SIZE // 2),
)


def rounded(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


class AllocatorMachine(RuleBasedStateMachine):
    """Model: the extents handed out, as start → size."""

    @initialize()
    def start(self) -> None:
        self.allocator = Allocator(SIZE)
        self.taken: dict[int, int] = {}

    def holes(self) -> dict[int, int]:
        """What is free, as the model sees it."""
        found, at = {}, 0
        for start in sorted(self.taken):
            if start > at:
                found[at] = start - at
            at = start + rounded(self.taken[start])
        if at < self.allocator.size:
            found[at] = self.allocator.size - at
        return found

    def add(self, start: int, size: int) -> None:
        end = start + rounded(size)
        assert start % GRANULE == 0
        assert any(hole <= start and end <= hole + room for hole, room in self.holes().items())
        self.taken[start] = size

    @rule(size=sizes)
    def allocate(self, size: int) -> None:
        before = self.holes()
        start = self.allocator.allocate(size)
        if start is None:  # it looks at a few holes a bin only, so it may miss some, but never much bigger ones
            assert all(room < 2 * rounded(size) for room in before.values())
            return
        self.add(start, size)
        if size >= PAGE and start % PAGE:
            assert all(room < 2 * (size + PAGE) for room in before.values())

    @rule(batch=st.lists(sizes, min_size=1, max_size=5))
    def allocate_run(self, batch: list[int]) -> None:
        starts = self.allocator.allocate_run(batch)
        if starts is None:
            return
        for i, (start, size) in enumerate(zip(starts, batch, strict=True)):
            self.add(start, size)
            assert size < PAGE or start % PAGE == 0
            if i:
                assert 0 <= start - starts[i - 1] - rounded(batch[i - 1]) < PAGE

    @rule(size=sizes)
    def allocate_pieces(self, size: int) -> None:
        free = self.allocator.free
        pieces = self.allocator.allocate_pieces(size)
        assert (pieces is None) == (free < rounded(size))
        if pieces is not None:
            assert sum(pieces[1::2]) == rounded(size)
            for start, length in zip(pieces[::2], pieces[1::2], strict=True):
                self.add(start, length)

    @rule(choice=st.randoms())
    def release(self, choice: random.Random) -> None:
        if self.taken:
            start = choice.choice(sorted(self.taken))
            size = self.taken.pop(start)
            self.allocator.release(start, size)
            with pytest.raises(ValueError):
                self.allocator.release(start, size)

    @rule(choice=st.randoms())
    def release_what_is_not_taken(self, choice: random.Random) -> None:
        for hole, room in self.holes().items():
            for start, size in ((hole, GRANULE), (hole + room - GRANULE, 2 * GRANULE), (hole - GRANULE, 2 * GRANULE)):
                with pytest.raises(ValueError):
                    self.allocator.release(start, size)
            break

    @rule()
    def recover(self) -> None:
        """A new allocator learns the same from the extents alone, while some are released."""
        twin = Allocator(SIZE, known=False)
        extents = list(self.taken.items())
        random.Random(1).shuffle(extents)
        for start, size in extents:
            assert twin.reserve([start, size])
            assert not twin.reserve([start, size])
        assert not twin.reserve([SIZE, GRANULE])
        assert not twin.reserve([-GRANULE, GRANULE])
        for _ in twin.find_holes():
            if extents:
                start, size = extents.pop()
                del self.taken[start]
                twin.release(start, size)
        self.allocator = twin

    @invariant()
    def same(self) -> None:
        if hasattr(self, "allocator"):
            assert dict(self.allocator.holes) == self.holes()
            assert self.allocator.free == sum(self.holes().values())


class SlotsMachine(RuleBasedStateMachine):
    """Model: the set of taken slots."""

    TOTAL = 60

    @initialize()
    def start(self) -> None:
        self.slots = Slots(self.TOTAL)
        self.records: list[list[int]] = []

    def taken(self) -> set[int]:
        return {slot for record in self.records for slot in record}

    @rule(count=st.integers(1, 7))
    def take(self, count: int) -> None:
        got = self.slots.take(count)
        free = self.TOTAL - len(self.taken())
        assert (got is None) == (free < count)
        if got is not None:
            assert len(set(got)) == count
            assert not self.taken() & set(got)
            self.records.append(got)

    @rule(choice=st.randoms())
    def give(self, choice: random.Random) -> None:
        if self.records:
            self.slots.give(self.records.pop(choice.randrange(len(self.records))))

    @rule()
    def recover(self) -> None:
        twin = Slots(self.TOTAL, known=False)
        for record in self.records:
            assert twin.reserve(record)
            assert not twin.reserve(record)
        assert not twin.reserve([self.TOTAL])
        for _ in twin.find_free():
            if self.records:
                twin.give(self.records.pop())
        self.slots = twin

    @invariant()
    def counted(self) -> None:
        if hasattr(self, "slots"):
            assert self.slots.used == len(self.taken())


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
SlotsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocator = AllocatorMachine.TestCase
TestSlots = SlotsMachine.TestCase


def test_freed_extents_merge() -> None:
    """U023: many small extents freed make one large hole."""
    allocator = Allocator(64 << 20)
    starts = [allocator.allocate(4 << 20) for _ in range(16)]
    assert None not in starts
    assert allocator.allocate(1) is None
    for start in starts[::2] + starts[1::2]:
        assert start is not None
        allocator.release(start, 4 << 20)
    assert allocator.allocate(64 << 20) == 0


def test_batches_adjoin() -> None:
    allocator = Allocator(64 << 20)
    first = allocator.allocate_run([100_000] * 8)
    second = allocator.allocate_run([100_000] * 8)
    assert first is not None
    assert second is not None
    assert 0 <= second[0] - first[-1] - rounded(100_000) < PAGE


def test_a_whole_segment_in_pieces() -> None:
    """No single-hole trap: half of the pages are free, none beside another."""
    allocator = Allocator(64 * PAGE)
    starts = allocator.allocate_run([PAGE] * 64)
    assert starts is not None
    for start in starts[::2]:
        allocator.release(start, PAGE)
    assert allocator.allocate(2 * PAGE) is None
    pieces = allocator.allocate_pieces(32 * PAGE)
    assert pieces is not None
    assert sum(pieces[1::2]) == 32 * PAGE
    assert allocator.free == 0


def test_slots_that_look_like_a_row_are_one() -> None:
    """Who has first and last slot, and how many, takes them for a row if that fits."""
    slots = Slots(8)
    taken = [slots.take(1) for _ in range(8)]
    for slot in (6, 1, 4):
        assert taken[slot] == [slot]
        slots.give([slot])
    assert slots.take(3) == [1, 4, 6]
