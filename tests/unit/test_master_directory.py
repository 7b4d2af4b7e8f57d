"""The directory's rules, one by one, on a clock of our own."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mooncake.errors import StoreError
from mooncake.master.allocator import Allocator
from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.directory import Directory
from mooncake.master.granting import Wish
from mooncake.master.keymap import KeyMap
from mooncake.master.membership import Client
from mooncake.master.objects import Object, checksum_of
from mooncake.master.placement import order
from mooncake.master.plain import Plain, columns_of
from mooncake.master.pool import Segment
from mooncake.master.slots import Slots
from mooncake.rpc.message import Message
from mooncake.rpc.messages import AnnouncePlain, Found, Grant, Kill, PutOptions, Record, SegmentInfo
from mooncake.rpc.record_messages import Body
from mooncake.transfer.table import COMPLETE

KIB = 1 << 10


class World:
    """A directory, one client, and owners that confirm every kill at once."""

    def __init__(self, *segments: tuple[str, int], **settings: Any) -> None:
        self.now = 100.0
        self.directory = Directory(
            MasterConfig(**settings), Counters(), clock=lambda: self.now, wall=lambda: 1e9 + self.now
        )
        self.client = self.directory.clients.arrive("2-2", "h1")
        self.segments = [
            self.mount(number, host, size) for number, (host, size) in enumerate(segments or (("h1", 64 * KIB),), 1)
        ]

    def mount(self, number: int, host: str, size: int) -> Segment:
        info = SegmentInfo(number, f"{host}:{number}", size, "", "", host, f"9-{number}")
        return self.directory.mount(info, 0, 0, self.take_kill, self.now)[0]

    def take_kill(self, kill: Message) -> None:
        """What an owner is told; only kills have an answer."""
        if not isinstance(kill, Kill):
            return
        segment = self.directory.pool.segments[kill.segment]
        dead = [i for i, hide in enumerate(kill.hide) if not hide]
        self.directory.killed(segment, [kill.slots[i] for i in dead], [kill.seqs[i] for i in dead])

    def settle(self) -> None:
        for _ in range(100):
            for segment, kill in self.directory.pool.take_outbox():
                if segment.send is not None:
                    segment.send(kill)
            while self.directory.background:
                for _ in self.directory.background.popleft():
                    pass
            if not self.directory.granting.serve(self.now):
                break

    def wait(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / 0.25))):
            self.now += min(seconds, 0.25)
            for segment in self.directory.pool.segments.values():
                self.directory.heartbeat(segment, self.now)
            self.directory.tick(self.now)
            self.settle()

    def ask(self, keys: list[str], size: int, options: PutOptions | None = None, client: Client | None = None) -> Wish:
        groups = options.groups if options is not None else []
        wish = Wish(client or self.client, keys, [size] * len(keys), options, groups, self.now + 0.7)
        self.directory.granting.ask(wish, self.now)
        self.settle()
        return wish

    def start(self, keys: list[str], size: int, options: PutOptions | None = None) -> list[int | Grant]:
        wish = self.ask(keys, size, options)
        if not wish.settled:
            self.wait(0.75)
        assert wish.settled
        return wish.answers

    def put(self, keys: list[str], size: int, options: PutOptions | None = None) -> list[int]:
        answers = self.start(keys, size, options)
        seqs = [grant.seq for grant in answers if isinstance(grant, Grant)]
        codes = iter(self.directory.end_puts(seqs, {}, self.client, self.now))
        return [next(codes) if isinstance(grant, Grant) else grant for grant in answers]

    def there(self, keys: list[str]) -> str:
        """Without leasing anything."""
        return "".join("-" if self.directory.peek(key) is None else key[-1] for key in keys)

    def put_on(self, key: str, options: PutOptions, size: int = 10 * KIB) -> int:
        """Which segment it was put on."""
        assert self.put([key], size, options) == [0]
        return self.found(key).places[0][0]

    def found(self, key: str) -> Found:
        found = self.directory.peek(key)
        assert found is not None
        return found


# ---------------------------------------------------------------- eviction order


def test_later_keys_of_a_batch_leave_first() -> None:
    world = World()
    world.put(list("abcd"), 16 * KIB)
    world.put(["x"], 32 * KIB)
    assert world.there(list("abcdx")) == "ab--x"


def test_what_was_used_last_leaves_last() -> None:
    world = World()
    for key in "abcd":
        world.put([key], 16 * KIB)
    world.directory.exist(["a"], world.now)
    world.wait(11)
    world.put(["x"], 32 * KIB)
    assert world.there(list("abcdx")) == "a--dx"


def test_leased_values_stay_and_probes_may_be_broken_oldest_first() -> None:
    world = World()
    world.put(list("abcd"), 16 * KIB)
    world.directory.exist(["b"], world.now)
    world.wait(0.5)
    world.directory.exist(list("acd"), world.now)
    assert world.start(["x"], 16 * KIB) == [-200]  # none is old enough
    world.wait(1.0)
    assert world.put(["x"], 16 * KIB) == [0]
    assert world.there(list("abcdx")) == "a-cdx"


def test_what_was_just_put_outlasts_what_was_read_before() -> None:
    """A lease keeps a value out of the eviction order for seconds; that must not make a new value the oldest in it."""
    world = World(("h1", 100 * KIB), eviction_ratio=0.1, high_watermark=0.8)
    world.put(list("abcdef"), 8 * KIB)
    world.directory.exist(list("abcdef"), world.now)
    world.wait(1)
    world.put(list("uvwxyz"), 8 * KIB)
    while world.directory.granting.evict_ahead(world.now):
        pass
    world.settle()
    assert world.there(list("abcdefuvwxyz")) == "abcdefuvwxyz"  # nobody is waiting: not yet
    world.wait(1.5)
    assert world.put(list("1"), 16 * KIB) == [0]  # somebody is: the oldest leases are broken
    assert world.there(list("abcdefuvwxyz1")) == "abcd--uvwxyz1"
    world.wait(8)  # the other leases end: the values that were read go first
    world.directory.granting.evict_ahead(world.now)
    world.settle()
    assert world.there(list("uvwxyz")) == "uvwxyz"
    assert len(world.there(list("abcd")).replace("-", "")) < 4


def test_what_was_just_put_goes_if_there_is_nothing_else() -> None:
    world = World(("h1", 64 * KIB))
    world.put(list("abcd"), 16 * KIB)
    world.directory.exist(["a"], world.now)
    world.wait(0.5)
    world.put(["x"], 32 * KIB)  # the lease of "a" is too young to be broken
    assert world.there(list("abcdx")) == "ab--x"


def test_a_prefix_ends_at_the_first_gap_and_only_it_is_leased() -> None:
    world = World()
    world.put(["r0/a", "r1/a", "r0/b", "r1/b", "r0/c", "r0/d", "r1/d"], KIB)
    heads = ["r0/", "r1/"]
    assert world.directory.prefix(heads, list("abcd"), world.now) == 2
    assert world.directory.prefix(heads, list("dab"), world.now, lease=False) == 3
    assert world.directory.prefix(["r0/"], list("abcdx"), world.now, lease=False) == 4
    assert world.directory.prefix(heads, [], world.now) == 0
    leased = ["r0/a", "r1/a", "r0/b", "r1/b"]
    assert world.directory.remove(leased, False, world.now) == [-706] * 4
    assert world.directory.remove(["r0/c", "r0/d", "r1/d"], False, world.now) == [0] * 3


def test_a_read_lease_is_never_broken() -> None:
    world = World()
    world.put(list("ab"), 32 * KIB)
    lease = world.directory.begin_read(world.now)
    world.directory.read(["a"], lease, world.now)
    world.wait(5)
    assert world.put(["x"], 64 * KIB) == [-200]
    assert world.there(list("a")) == "a"
    world.directory.end_read([lease.number], world.now)
    assert world.directory.remove(["a"], False, world.now) == [-706]  # its probe lease goes on
    world.wait(6)
    assert world.put(["y"], 64 * KIB) == [0]


def test_a_lease_runs_out_by_itself() -> None:
    world = World()
    world.put(["a"], 32 * KIB)
    lease = world.directory.begin_read(world.now)
    world.directory.read(["a"], lease, world.now)
    assert world.directory.remove(["a"], True, world.now) == [0]
    world.settle()
    world.wait(9.5)
    assert world.directory.quarantined_bytes == 32 * KIB
    world.wait(1)
    assert world.directory.totals().allocated_bytes == 0
    assert world.directory.totals().read_leases == 0


def test_hard_pins_stay_but_can_be_removed() -> None:
    world = World()
    assert world.put(["a"], 48 * KIB, PutOptions(hard_pin=True)) == [0]
    assert world.put(["b"], 32 * KIB) == [-200]
    assert world.directory.remove(["a"], False, world.now) == [0]
    assert world.put(["b"], 32 * KIB) == [0]


def test_soft_pins_leave_only_when_nothing_else_is_left() -> None:
    world = World()
    world.put(["a"], 16 * KIB, PutOptions(soft_pin_action=1))
    world.put(["b"], 48 * KIB)
    assert world.directory.totals().soft_pinned == 1
    world.put(["c"], 48 * KIB)
    assert world.there(list("abc")) == "a-c"
    world.put(["d"], 64 * KIB)
    assert world.there(list("acd")) == "--d"
    assert world.directory.totals().soft_pinned == 0


def test_soft_pins_can_be_kept_altogether() -> None:
    world = World(allow_evict_soft_pinned=False)
    world.put(["a"], 16 * KIB, PutOptions(soft_pin_action=1))
    assert world.put(["b"], 64 * KIB) == [-200]
    world.directory.exist(["a"], world.now)
    world.wait(5)
    assert world.put(["b"], 64 * KIB) == [-200]  # nor by breaking a lease


def test_a_soft_pin_ends_in_time_whatever_is_read() -> None:
    """U021."""
    world = World(allow_evict_soft_pinned=False, lease_ms=100)
    world.put(["a"], 48 * KIB, PutOptions(soft_pin_action=1, soft_pin_ttl_ms=2000))
    for _ in range(3):
        world.directory.exist(["a"], world.now)
        world.wait(0.25)
    assert world.put(["b"], 32 * KIB) == [-200]
    for _ in range(8):
        world.directory.exist(["a"], world.now)
        world.wait(0.25)
    assert world.directory.totals().soft_pinned == 0
    assert world.put(["b"], 32 * KIB) == [0]


@pytest.mark.parametrize(
    "options", [PutOptions(soft_pin_ttl_ms=5), PutOptions(soft_pin_action=1, soft_pin_ttl_ms=86_400_001)]
)
def test_impossible_soft_pins_are_refused(options: PutOptions) -> None:
    assert World().start(["a"], 1, options) == [-600]


def test_groups_leave_together() -> None:
    """U024: 100 groups of 8; under pressure each has 0 or 8 members."""
    world = World(("h1", 800 * 4 * KIB))
    for i in range(100):
        keys = [f"{i}-{j}" for j in range(8)]
        assert world.put(keys, 4 * KIB, PutOptions(groups=[f"g{i}"] * 8)) == [0] * 8
    world.directory.exist(["3-3"], world.now)  # renews all of group 3
    for i in range(300):
        assert world.put([f"x{i}"], 4 * KIB) == [0]
    members = [sum(world.directory.peek(f"{i}-{j}") is not None for j in range(8)) for i in range(100)]
    assert set(members) == {0, 8}
    assert members[3] == 8
    assert world.directory.remove(["3-0"], False, world.now) == [-706]


def test_a_group_waits_for_its_open_puts() -> None:
    world = World()
    world.put(["a"], 16 * KIB, PutOptions(groups=["g"]))
    world.start(["b"], 16 * KIB, PutOptions(groups=["g"]))
    assert world.put(["x"], 48 * KIB) == [-200]
    assert world.there(list("a")) == "a"


def test_eviction_ahead_of_demand() -> None:
    world = World(("h1", 1000 * KIB), eviction_ratio=0.1, high_watermark=0.8)
    world.put([f"k{i:03}" for i in range(85)], 10 * KIB)
    while world.directory.granting.evict_ahead(world.now):
        pass
    world.settle()
    used = world.directory.totals().allocated_bytes / (1000 * KIB)
    assert 0.65 <= used <= 0.75
    assert not world.directory.granting.evict_ahead(world.now)


def test_the_line_is_served_in_order() -> None:
    """An early large put is not starved by later small ones."""
    world = World()
    world.put(["a"], 64 * KIB)
    lease = world.directory.begin_read(world.now)
    world.directory.read(["a"], lease, world.now)
    world.directory.remove(["a"], True, world.now)
    large, small = world.ask(["b"], 64 * KIB), world.ask(["c"], 1 * KIB)
    world.directory.end_read([lease.number], world.now)
    world.settle()
    assert isinstance(large.answers[0], Grant)
    assert not small.settled


# ---------------------------------------------------------------- puts


def test_an_old_put_makes_way() -> None:
    world = World()
    first = world.start(["a"], 16 * KIB)[0]
    world.wait(29)
    assert world.start(["a"], 16 * KIB) == [-705]
    world.wait(2)
    second = world.start(["a"], 16 * KIB)[0]
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    assert world.directory.end_puts([first.seq, second.seq], {}, world.client, world.now) == [-700, 0]
    assert world.directory.counters["master_put_start_discard_cnt"] == 1


def test_a_very_old_put_is_forgotten() -> None:
    world = World()
    world.start(["a"], 16 * KIB)
    world.now += 599
    world.wait(2)
    assert world.directory.totals().open_puts == 0
    assert world.directory.totals().allocated_bytes == 0


def test_lost_replicas_do_not_count() -> None:
    world = World(("h1", 64 * KIB), ("h2", 64 * KIB))
    grant = world.start(["a"], 16 * KIB, PutOptions(replica_num=2))[0]
    assert isinstance(grant, Grant)
    lost = world.directory.lost_replicas([grant.seq, 0])
    assert world.directory.end_puts([grant.seq], lost, world.client, world.now) == [0]
    assert world.found("a").places[0][0] == grant.replicas[1][0].segment
    world.settle()
    assert world.directory.totals().allocated_bytes == 16 * KIB
    grant = world.start(["b"], 16 * KIB)[0]
    assert isinstance(grant, Grant)
    assert world.directory.end_puts([grant.seq], {grant.seq: {0}}, world.client, world.now) == [-712]


# ---------------------------------------------------------------- placement


def test_replicas_prefer_other_hosts() -> None:
    """U040: 2 hosts with 4 segments each; after the loss of a host every key is there."""
    world = World(*[(host, 64 * KIB) for host in ("h1", "h2") for _ in range(4)])
    for i in range(20):
        world.put([f"k{i}"], 4 * KIB, PutOptions(replica_num=2))
    for segment in world.segments[:4]:
        world.directory.unmount(segment, world.now)
    world.settle()
    assert world.directory.totals().key_count == 20


def test_fewer_segments_than_replicas_will_do() -> None:
    world = World(("h1", 64 * KIB), ("h1", 64 * KIB))
    assert world.put(["a"], 4 * KIB, PutOptions(replica_num=5)) == [0]
    assert len(world.found("a").places) == 2


def test_preferred_segments_come_first() -> None:
    world = World(*[(f"h{i}", 64 * KIB) for i in range(5)])
    options = PutOptions(preferred=["nobody", "h3:4", "h1:2"])
    assert [world.put_on(f"k{i}", options) for i in range(3)] == [4, 4, 4]
    assert world.put_on("big", PutOptions(preferred=["h3:4", "h1:2"]), 40 * KIB) == 2


def test_a_batch_on_one_node() -> None:
    world = World(*[(host, 32 * KIB) for host in ("h1", "h2", "h2")])
    world.put(list("ab"), 15 * KIB, PutOptions(same_node=True))
    assert {world.found(key).places[0][0] for key in "ab"} == {1}
    world.put(list("cd"), 30 * KIB, PutOptions(same_node=True))
    assert {world.found(key).places[0][0] for key in "cd"} == {2, 3}


def test_strategies() -> None:
    world = World(("h1", 64 * KIB), ("h2", 64 * KIB), ("h3", 64 * KIB))
    world.segments[0].allocator.allocate(10 * KIB)
    world.segments[2].allocator.allocate(20 * KIB)

    def numbers(strategy: str) -> list[int]:
        return [segment.number for segment in order(world.segments, strategy, None, "h3", 0)]

    assert numbers("free_ratio_first") == [2, 1, 3]
    assert numbers("local_first")[0] == 3
    random.seed(1)
    assert {numbers("random")[0] for _ in range(50)} == {1, 2, 3}


def test_nothing_new_on_a_suspect_or_silent_segment() -> None:
    """U033: a silent one is avoided before it expires."""
    world = World(("h1", 64 * KIB), ("h2", 64 * KIB))
    for _ in range(16):
        world.now += 0.25
        world.directory.heartbeat(world.segments[1], world.now)
        world.directory.tick(world.now)
    for i in range(4):
        assert world.put([f"k{i}"], 4 * KIB) == [0]
        assert world.found(f"k{i}").places[0][0] == 2
    for _ in range(28):
        world.now += 0.25
        world.directory.heartbeat(world.segments[1], world.now)
        world.directory.tick(world.now)
    assert [view.segment for view in world.directory.segments()] == [2]


# ---------------------------------------------------------------- many keys


def test_the_map_of_many_keys() -> None:
    keys = KeyMap()
    for i in range(90_000):
        keys.insert(Object(key=str(i)))
    assert len(keys) == 90_000
    for i in range(0, 90_000, 2):
        assert keys.pop(str(i)) is not None
    assert keys.pop("0") is None
    for i in range(0, 1000, 2):
        keys.insert(Object(key=str(i)))
    assert [obj is not None for obj in keys.find_many(["0", "1", "1000", "89999", "x"])] == [
        True,
        True,
        False,
        True,
        False,
    ]
    seen = [obj.key for some in keys.slices() for obj in some]
    assert len(seen) == len(set(seen)) == len(keys) == 45_500


def test_no_single_hole_trap() -> None:
    """Half of the pool is free, no two pages of it together: a value of that half is stored in pieces."""
    world = World(("h1", 4 << 20))
    keys = [f"{i:04}" for i in range(1024)]
    world.put(keys, 4 * KIB)
    world.directory.remove(keys[::2], True, world.now)
    world.settle()
    assert world.put(["x"], 2 << 20) == [0]
    assert len(world.found("x").places[0]) == 3 * 512
    assert len(world.there(keys)) - world.there(keys).count("-") == 512
    world.directory.remove(["x"], False, world.now)
    world.settle()
    assert world.directory.totals().allocated_bytes == 2 << 20


def plain(key: str, seq: int, at: int) -> Record:
    return Record([at], COMPLETE, 1, seq, Body(key, 256, [at * 256, 256], client="1-1"))


def test_a_segment_that_takes_long_to_announce_is_not_lost() -> None:
    """It has no time for heartbeats meanwhile."""
    world = World(client_ttl_s=10.0)
    info = SegmentInfo(7, "h1:7", 64 * KIB, "", "", "h1", "9-7")
    segment, _ = world.directory.mount(info, 1, 0, world.take_kill, world.now)
    for i in range(4):
        world.now += 6
        for _ in world.directory.announce(segment, [plain(f"k{i}", i + 1, i)], last=i == 3):
            pass
        world.directory.tick(world.now)
        assert segment.mounted
        assert len(world.directory.catalog.objects) == i + 1
    assert not segment.filled
    world.settle()
    assert segment.filled
    for _ in world.directory.announce(segment, [plain("late", 9, 9)], last=True):
        pass
    assert world.directory.find(["late"]) == [None]


@pytest.mark.parametrize("seed", range(20))
def test_plain_records_are_taken_as_others_are(seed: int) -> None:
    """Some that overlap, some of keys that are there or were removed, some impossible."""
    dice = random.Random(seed)
    seqs = [dice.choice([0, 1 << 62, 100 + i, 100 + i, 100 + i, 100 + i]) if seed % 2 else 100 + i for i in range(300)]
    columns = Plain(
        "1-1", [f"k{dice.randrange(-1, 300)}".replace("k-1", "") for _ in seqs], seqs,
        [dice.choice([0, 1, 256, 700]) if seed % 3 == 0 else 256 for _ in seqs],
        [dice.choice([i, i, dice.randrange(270)]) * 256 + (seed % 5 == 0) * dice.choice([0, 0, 7]) for i in range(300)],
        [dice.choice([i * 2, i * 2, dice.randrange(600)]) << 8 | dice.choice([1, 1, 2]) for i in range(300)],
        [dice.choice([0, 1 << 63 | i]) for i in range(300)] if seed % 4 else [],
    )  # fmt: skip

    def known(together: bool) -> tuple[Any, ...]:
        world = World(("h1", 64 * KIB))
        assert world.put(["k3"], 256) == [0]
        world.directory.tombstones.note("k5", 1 << 61)
        info = SegmentInfo(7, "h1:7", 64 * KIB, "", "", "h1", "9-7")
        segment, _ = world.directory.mount(info, 1, 0, world.take_kill, world.now)
        steps = (
            [columns.some(at, at + 500) for at in range(0, 300, 500)] if together
            else [columns.some(at, at + 1) for at in range(300)]
        )  # fmt: skip
        for some in steps:
            for _ in world.directory.recovery.announce_plain(segment, some):
                pass
        for _ in world.directory.announce(segment, [], last=True):
            pass
        world.settle()
        world.wait(30)  # until nobody can be reading what was in the way
        objects = {obj.key: obj for some in world.directory.catalog.objects.slices() for obj in some}
        return (
            sorted((obj.key, obj.seq, obj.offset, obj.slots, checksum_of(obj)) for obj in objects.values()),
            segment.slots.used, segment.allocator.used, segment.quarantined, segment.first_seq,
        )  # fmt: skip

    assert known(together=True) == known(together=False)


def test_columns_of_different_lengths_are_refused() -> None:
    column = bytes(16)
    assert len(columns_of(AnnouncePlain(7, "1-1", ["a", "b"], column, column, column, column)).seqs) == 2
    for short in range(5):
        columns = [column[:8] if i == short else column for i in range(5)]
        with pytest.raises(StoreError):
            columns_of(AnnouncePlain(7, "1-1", ["a", "b"], *columns))


def test_one_call_for_many_slots_does_as_many_calls() -> None:
    dice = random.Random(3)
    runs = [[first, first + 1][: dice.choice([1, 2])] for first in (dice.randrange(90) for _ in range(200))]
    one, many = Slots(60, known=False), Slots(60, known=False)
    packed = [run[0] << 8 | len(run) for run in runs]
    assert many.reserve_runs(packed) == [one.reserve(run) for run in runs]
    assert many.used == one.used
    for slots in (one, many):
        for _ in slots.find_free():
            pass
    assert one.take(one.total - one.used) == many.take(many.total - many.used)


def test_one_call_for_many_extents_does_as_many_calls() -> None:
    dice = random.Random(4)
    size = 9 << 20
    starts, sizes, at = [], [], 0
    for _ in range(400):
        starts.append(at)
        sizes.append(dice.choice([1, 255, 256, 5000, 300_000]))
        at += -(-sizes[-1] // 256) * 256
        if dice.random() < 0.2:
            at = dice.choice([-256, 100, dice.randrange(size // 256) * 256, size - 256, size])
    one, many = Allocator(size, known=False), Allocator(size, known=False)
    expected = [one.reserve([start, length]) for start, length in zip(starts, sizes, strict=True)]
    assert many.reserve_each(starts, sizes) == expected
    assert (many.free, True in expected, False in expected) == (one.free, True, True)


def test_only_missing_keys_are_inserted() -> None:
    keys = KeyMap()
    first = [Object(key=f"k{i}") for i in range(79_998)]
    assert keys.insert_missing(first) == []
    more = [Object(key=f"k{i}") for i in (5, 79_998, 79_999, 80_000, 79_999, 80_001)]
    assert keys.insert_missing(more) == [0, 4]
    assert len(keys) == 80_002
    assert keys.get("k5") is first[5]
    assert keys.get("k79999") is more[2]
    assert keys.insert_missing([Object(key="k80001"), Object(key="k1")]) == [0, 1]


def test_nothing_is_evicted_in_vain_while_a_former_masters_readers_may_be_reading() -> None:
    """What a new master evicts comes free only when the longest lease of the former one is over: a put into a full
    pool used to evict ever more until its time was over, and then got nothing."""
    world = World(lease_ms=5_000, eviction_ratio=0.1)
    world.segments.clear()
    world.directory.unmount(world.directory.pool.segments[1], world.now)
    world.settle()
    info = SegmentInfo(7, "h1:7", 64 * KIB, "", "", "h1", "9-7")
    segment, _ = world.directory.mount(info, 1, 0, world.take_kill, world.now)
    for _ in world.directory.announce(segment, [plain(f"k{i}", i + 1, i) for i in range(254)], last=True):
        pass
    world.settle()
    assert segment.filled
    assert world.put(["fits"], 512) == [0]
    for _ in range(3):
        assert world.start(["new"], 2 * KIB) == [-200]
        assert len(world.directory.catalog.objects) == 255
    world.wait(5)
    assert len(world.directory.catalog.objects) > 200  # evicted ahead of demand, once
    assert world.put(["new"], 2 * KIB) == [0]
    assert len(world.directory.catalog.objects) > 200
