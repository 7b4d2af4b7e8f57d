"""The segment table against a plain dict: any order of writing, completing, revoking, killing and scanning."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mooncake.rpc.messages import Kill
from mooncake.rpc.record_messages import Body
from mooncake.segment.owner import Owner
from mooncake.segment.writers import Writer, Writers
from mooncake.transfer import table
from mooncake.transfer.memory import SegmentMemory

SIZE = 1 << 20


class TableMachine(RuleBasedStateMachine):
    @initialize()
    def make(self):
        self.memory = SegmentMemory.create(7, SIZE)
        self.writers = Writers()
        self.owner = Owner(7, self.memory, self.writers)
        self.alive: dict[int, Writer] = {}
        self.free = list(range(200))
        self.seq = 0
        self.term = 1
        self.memory.table.set_term(1, 10_000)
        self.records: dict[int, tuple[int, list[int], Body]] = {}  # seq → state, slots, body
        self.writer_of: dict[int, int] = {}
        self.revoked: set[int] = set()  # asked to die, its writer could still write

    @rule(
        key=st.text(min_size=1, max_size=300),
        extents=st.integers(1, 40),
        group=st.sampled_from(["", "g", "g" * 200]),
    )
    def write(self, key, extents, group):
        body = Body(key, extents * 10, [x for i in range(extents) for x in (i * 256, 10)], group=group)
        need = table.slots_needed(key, group, body.client, extents)
        if need > len(self.free):
            return
        slots, self.free = self.free[:need], self.free[need:]
        self.seq += 1
        writer = self.writers._add(Writer(next(self.writers._numbers)))  # a process without pidfd: alive till removed
        self.alive[writer.number] = writer
        self.memory.table.begin(slots, self.seq, self.term, writer.number, body)
        table.fence()
        assert self.memory.table.may_write(slots[0], self.seq, self.term)
        assert not self.memory.table.may_write(slots[0], self.seq, self.term + 1)
        self.records[self.seq] = (table.WRITING, slots, body)
        self.writer_of[self.seq] = writer.number

    @rule(pick=st.integers(0, 1000))
    def complete(self, pick):
        open_seqs = [s for s, (state, _, _) in self.records.items() if state == table.WRITING and s not in self.revoked]
        if not open_seqs:
            return
        seq = open_seqs[pick % len(open_seqs)]
        _, slots, body = self.records[seq]
        self.memory.table.set_state(slots[0], table.COMPLETE)
        self.records[seq] = (table.COMPLETE, slots, body)

    @rule(pick=st.integers(0, 1000), hide=st.booleans())
    def kill(self, pick, hide):
        if not self.records:
            return
        seq = list(self.records)[pick % len(self.records)]
        state, slots, body = self.records[seq]
        killed = self.owner.kill(Kill(7, [slots[0]], [seq], bytes([hide])))
        if hide:
            assert not killed.slots
            if state == table.COMPLETE:
                self.records[seq] = (table.REMOVED, slots, body)
            return
        if state == table.WRITING and self.writer_of[seq] in self.alive:
            assert not killed.slots, "extents of a live writer must stay quarantined"
            assert not self.memory.table.may_write(slots[0], seq, self.term)
            self.revoked.add(seq)
            return
        assert killed.slots == [slots[0]]
        self.forget(seq)

    @rule(pick=st.integers(0, 1000))
    def writer_dies(self, pick):
        if not self.alive:
            return
        number = list(self.alive)[pick % len(self.alive)]
        self.writers.remove(self.alive.pop(number))
        settled = self.owner.settle()
        expected = {s for s in self.revoked if self.writer_of[s] == number}
        assert (set(settled.seqs) if settled else set()) == expected
        for seq in expected:
            self.forget(seq)

    def forget(self, seq):
        _, slots, _ = self.records.pop(seq)
        self.revoked.discard(seq)
        self.free += slots

    @invariant()
    def scan_finds_what_lives(self):
        if not hasattr(self, "memory"):
            return
        found = {view.seq: view for view in self.memory.table.records()}
        assert set(found) == set(self.records)
        for seq, (state, slots, body) in self.records.items():
            view = found[seq]
            assert (view.state, view.slots[: len(slots)], view.body) == (state, slots[: len(view.slots)], body)

    def teardown(self):
        if hasattr(self, "memory"):
            self.memory.close()


TableMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTable = TableMachine.TestCase


def test_announcements_are_cut_and_the_last_is_marked():
    memory = SegmentMemory.create(9, 4 << 20)
    owner = Owner(9, memory, Writers())
    assert [(len(m.records), m.last) for m in owner.announcements()] == [(0, True)]
    for i in range(2001):
        memory.table.begin([i], i + 1, 1, 1, Body(f"k{i}", 5, [i * 256, 5]))
        memory.table.set_state(i, table.COMPLETE)
    *plain, last = owner.announcements()
    assert [len(m.keys) for m in plain] == [1000, 1000, 1]
    assert [key for m in plain for key in m.keys] == [f"k{i}" for i in range(2001)]
    assert (last.records, last.last) == ([], True)
    for i in range(1001):  # those that are more than plain go as whole records
        memory.table.begin([i], i + 1, 1, 1, Body(f"k{i}", 5, [i * 256, 5], hard_pin=True))
        memory.table.set_state(i, table.COMPLETE)
    first, plain, last = owner.announcements()
    assert (len(first.records), first.last) == (1000, False)
    assert (len(plain.keys), len(last.records), last.last) == (1000, 1, True)
    memory.close()


def test_a_record_is_held_until_all_who_hold_it_let_go():
    memory = SegmentMemory.create(9, 4 << 20)
    owner = Owner(9, memory, Writers())
    memory.table.begin([3], 1, 1, 1, Body("k", 5, [0, 5]))
    memory.table.set_state(3, table.COMPLETE)
    for _ in range(2):
        owner.hold(3)
    assert owner.kill(Kill(9, [3], [1], b"\0")).slots == []
    owner.let_go(3)
    assert owner.settle() is None
    owner.let_go(3)
    settled = owner.settle()
    assert settled is not None
    assert (settled.slots, settled.seqs) == ([3], [1])
    assert not owner.waiting
    memory.close()
