"""Drain jobs against a simple world, with simulated servers that copy, fail and go away.

- a value that was put, and not removed, is readable as long as the segment it was last known in is mounted;
- a job that has succeeded left its segments empty, and they can be unmounted without a loss;
- one that has failed has lost a segment, or names values that are still where they were;
- nothing new is placed in a segment that is being drained; after FAILED and CANCELED it is usable again.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake.errors import StoreError
from mooncake.master import drains
from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.directory import Directory
from mooncake.master.granting import Wish
from mooncake.master.objects import parts
from mooncake.master.pool import Segment
from mooncake.rpc.messages import Grant, Kill, PutOptions, SegmentInfo
from mooncake.rpc.segment_messages import Draining
from mooncake.rpc.task_messages import CopyPart

SIZE = 64 << 10
KEYS = [f"k{i}" for i in range(10)]


class DrainMachine(RuleBasedStateMachine):
    @initialize(count=st.integers(2, 3))
    def start(self, count: int) -> None:
        random.seed(0)
        self.now = 1000.0
        config = MasterConfig(high_watermark=1.0, processing_task_timeout_s=20.0)
        self.directory = Directory(config, Counters(), clock=lambda: self.now, wall=lambda: 1.7e9 + self.now)
        self.client = self.directory.clients.arrive("1-1", "h")
        self.values: set[str] = set()  # acknowledged, and neither removed nor evicted by a put
        self.evicted = 0
        self.unmounted: set[int] = set()
        self.open: dict[int, str] = {}
        self.copies: list[CopyPart] = []
        self.leases: list[int] = []
        self.jobs: list[drains.Job] = []
        self.drained: dict[tuple[int, int], list[Segment]] = {}
        self.ended: set[tuple[int, int]] = set()
        self.segments = [self.mount(number + 1) for number in range(count)]

    def mount(self, number: int) -> Segment:
        mounted: list[Segment] = []

        def take(kill: Kill | Draining) -> None:
            if isinstance(kill, Draining):
                return
            dead = [(s, q) for s, q, hide in zip(kill.slots, kill.seqs, kill.hide, strict=True) if not hide]
            self.directory.killed(mounted[0], [slot for slot, _ in dead], [seq for _, seq in dead])

        info = SegmentInfo(number, f"s{number}", SIZE, "127.0.0.1:1", "", f"h{number}", f"{number}-{number}")
        segment, _ = self.directory.mount(info, 0, 10_000, take, self.now)
        mounted.append(segment)
        return segment

    def settle(self) -> None:
        directory = self.directory
        while directory.background:
            for _ in directory.background.popleft():
                pass
        for segment, kill in directory.pool.take_outbox():
            if segment.send is not None:
                segment.send(kill)
        self.copies += [copy for _, copy in directory.tasks.take_outbox()]
        for job in self.jobs:
            if job.ended and job.number not in self.ended:
                self.ended.add(job.number)
                self.check_end(job)

    def check_end(self, job: drains.Job) -> None:
        there = [segment for segment in self.drained[job.number] if segment.mounted]
        if job.status == drains.SUCCEEDED:
            assert all(segment.allocator.used == 0 and segment.drained for segment in there)
        else:
            assert not any(segment.draining for segment in there)
        if job.status == drains.FAILED:
            gone = [number for number in self.unmounted if f"s{number}" in job.names]
            assert ("was lost" in job.message and gone) or job.given_up, job.message

    # -- users

    @rule(
        key=st.sampled_from(KEYS),
        size=st.sampled_from([100, 5000, 20_000]),
        copies=st.integers(1, 2),
        group=st.sampled_from(["", "g"]),
        hard=st.booleans(),
        end=st.sampled_from([True, True, False]),
    )
    def put(self, key: str, size: int, copies: int, group: str, hard: bool, end: bool) -> None:
        options = PutOptions(copies, hard_pin=hard, groups=[group] if group else [])
        wish = Wish(self.client, [key], [size], options, options.groups, self.now)
        self.directory.granting.ask(wish, self.now)
        self.settle()
        if not wish.settled:
            return
        answer = wish.answers[0]
        if isinstance(answer, Grant):
            used = {part.segment for replica in answer.replicas for part in replica}
            assert not any(segment.draining for segment in self.segments if segment.number in used)
            self.open[answer.seq] = key
            if end:
                self.end(len(self.open) - 1)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 20))
    def end(self, which: int) -> None:
        seq = sorted(self.open)[which % len(self.open)]
        key = self.open.pop(seq)
        if self.directory.end_puts([seq], {}, self.client, self.now)[0] == 0:
            self.values.add(key)
        self.settle()

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: str) -> None:
        if self.directory.remove([key], True, self.now)[0] == 0:
            self.values.discard(key)
        self.settle()

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3))
    def read(self, keys: list[str]) -> None:
        lease = self.directory.begin_read(self.now, "1-1")
        self.directory.read(keys, lease, self.now)
        self.leases.append(lease.number)

    @rule()
    def hand_back(self) -> None:
        self.directory.end_read(self.leases, self.now, "1-1")
        self.leases.clear()
        self.settle()

    # -- the operator

    @rule(which=st.integers(0, 2), to=st.integers(-3, 2), most=st.integers(1, 3))
    def drain(self, which: int, to: int, most: int) -> None:
        names = [self.segments[which % len(self.segments)].name]
        targets = [] if to < 0 else [self.segments[to % len(self.segments)].name]
        try:
            job = self.directory.drains.create(names, targets, most)
            self.jobs.append(job)
            self.drained[job.number] = list(job.segments)
        except StoreError as error:
            assert int(error.code) in (-600, -101, -1010)

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        job = self.jobs[which % len(self.jobs)]
        try:
            self.directory.drains.cancel(job.number)
        except StoreError as error:
            assert job.ended
            assert int(error.code) == -1010
        self.settle()

    @rule(which=st.integers(0, 2), again=st.booleans())
    def unmount(self, which: int, again: bool) -> None:
        at = which % len(self.segments)
        segment = self.segments[at]
        if segment.mounted:
            gone = set()
            for key in self.values:
                obj = self.directory.catalog.objects.get(key)
                if obj is not None and any(part.segment is segment for part in parts(obj)):
                    gone.add(key)
            assert not (segment.drained and gone), "a drained segment still held values"
            self.directory.unmount(segment, self.now)
            self.unmounted.add(segment.number)
            self.settle()
            self.values -= {key for key in gone if self.directory.peek(key) is None}
        elif again:
            self.segments[at] = self.mount(segment.number)

    # -- servers and time

    @rule(count=st.integers(1, 4), code=st.sampled_from([0, 0, 0, -800]))
    def copy(self, count: int, code: int) -> None:
        some, self.copies = self.copies[:count], self.copies[count:]
        for copy in some:
            self.directory.tasks.reported(copy.copy_id, code, self.now)
            self.directory.move_on(self.now)
            self.settle()

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0, 15.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for segment in self.segments:
            self.directory.heartbeat(segment, self.now)
        self.directory.tick(self.now)
        self.settle()

    # -- always

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "directory"):
            return
        there = {key for key in self.values if self.directory.catalog.objects.get(key) is not None}
        self.evicted += len(self.values - there)  # by puts that found no room
        assert self.evicted <= self.directory.counters["master_evicted_key_count"]
        self.values = there
        assert all(self.directory.peek(key) is not None for key in self.values)

    def teardown(self) -> None:
        """Left alone, every job ends."""
        if not hasattr(self, "directory"):
            return
        for seq in list(self.open):
            self.directory.revoke_puts([seq], self.client, self.now)
        for _ in range(400):
            self.hand_back()
            self.copy(len(self.copies) or 1, 0)
            self.pass_time(0.2)
            if all(job.ended for job in self.jobs):
                break
        assert all(job.ended for job in self.jobs), [job for job in self.jobs if not job.ended]
        self.nothing_is_lost()


TestDrains = DrainMachine.TestCase
TestDrains.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
