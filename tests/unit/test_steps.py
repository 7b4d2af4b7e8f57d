"""However many puts and tenants wait, one step of the master's loop does a bounded part of the work."""

from __future__ import annotations

import pytest

from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.directory import Directory
from mooncake.master.granting import Wish
from mooncake.master.tenants.names import scope_of
from mooncake.rpc.messages import Grant, Kill, SegmentInfo

SIZE = 4096
BATCH = 100
TENANTS = [f"t{i}" for i in range(40)]
MOST_GRANTS = 400
MOST_EVICTIONS = 1000


class World:
    def __init__(self, config: MasterConfig) -> None:
        self.now = 1000.0
        self.counters = Counters()
        self.directory = Directory(config, self.counters, clock=lambda: self.now, wall=lambda: 1.7e9 + self.now)
        self.client = self.directory.clients.arrive("1-1", "h")

    def mount(self, size: int) -> None:
        number = len(self.directory.pool.segments) + 1
        info = SegmentInfo(number, f"s{number}", size, "127.0.0.1:1", "", "h", f"{number}-1")
        self.directory.mount(info, 0, 10_000, lambda _: None, self.now)

    def ask(self, name: str, batch: int, scope: str = "") -> Wish:
        keys = [f"{scope}{name}{batch}-{i}" for i in range(BATCH)]
        wish = Wish(self.client, keys, [SIZE] * BATCH, None, [], self.now + 60)
        self.directory.granting.ask(wish, self.now)
        return wish

    def end(self, wish: Wish) -> None:
        seqs = [answer.seq for answer in wish.answers if isinstance(answer, Grant)]
        assert len(seqs) == BATCH
        assert self.directory.end_puts(seqs, {}, self.client, self.now) == [0] * BATCH

    def confirm(self) -> None:
        for segment, kill in self.directory.pool.take_outbox():
            assert isinstance(kill, Kill)
            self.directory.killed(segment, kill.slots, kill.seqs)

    def step(self) -> bool:
        """One step, which must not do too much; whether there is more to do."""
        evicted, open_puts = self.counters["master_evicted_key_count"], len(self.directory.puts.by_seq)
        more = self.directory.granting.serve(self.now)
        more |= self.directory.granting.evict_ahead(self.now)
        assert self.counters["master_evicted_key_count"] - evicted <= MOST_EVICTIONS
        assert len(self.directory.puts.by_seq) - open_puts <= MOST_GRANTS
        self.confirm()
        return more

    def steps(self) -> int:
        count = 1
        while self.step():
            count += 1
            assert count < 1000
        return count


@pytest.mark.parametrize("tenants", [False, True])
def test_many_puts_that_waited_are_granted_in_steps(tenants: bool) -> None:
    quotas = dict.fromkeys(TENANTS, BATCH * SIZE) | {"former": len(TENANTS) * BATCH * SIZE}
    world = World(MasterConfig(tenant_quotas=quotas if tenants else None, high_watermark=1.0))
    world.mount(sum(quotas.values()) if tenants else quotas["former"])
    scopes = {name: scope_of(name) if tenants else name for name in quotas}
    formers = [world.ask("k", batch, scopes["former"]) for batch in range(len(TENANTS))]
    for former in formers:
        world.end(former)
    if tenants:
        occupied = [world.ask("k", 0, scopes[name]) for name in TENANTS]
        world.directory.revoke_puts(
            [answer.seq for wish in occupied for answer in wish.answers if isinstance(answer, Grant)],
            world.client, world.now,
        )  # fmt: skip
    world.directory.remove([key for former in formers for key in former.keys], True, world.now)
    wishes = [world.ask("new", 0, scopes[name]) for name in TENANTS]  # for what owners have not given back yet
    assert not any(wish.settled for wish in wishes)
    world.confirm()
    assert world.steps() >= len(TENANTS) * BATCH // MOST_GRANTS
    assert all(wish.settled for wish in wishes)
    assert world.directory.granting.waiting == 0
    for wish in wishes:
        world.end(wish)


def full(watermark: float) -> World:
    """Each tenant has all that it may have."""
    quotas = dict.fromkeys(TENANTS, 4 * BATCH * SIZE)
    world = World(MasterConfig(tenant_quotas=quotas, high_watermark=watermark))
    world.mount(5 * BATCH * SIZE * len(TENANTS))
    for name in TENANTS:
        for batch in range(4):
            world.end(world.ask("k", batch, scope_of(name)))
    world.now += 60
    for segment in world.directory.pool.segments.values():
        world.directory.heartbeat(segment, world.now)
    world.directory.catalog.end_leases(world.now, 1 << 20)
    return world


def test_tenants_that_need_room_make_it_in_steps() -> None:
    world = full(1.0)
    wishes = [world.ask("new", 0, scope_of(name)) for name in TENANTS]
    world.steps()
    for _ in range(3):
        world.confirm()
        world.steps()
    for wish in wishes:
        assert wish.settled
        world.end(wish)
    assert world.directory.granting.waiting == 0


def test_tenants_above_the_watermark_are_trimmed_in_steps() -> None:
    world = full(0.5)
    world.now += 1
    assert world.steps() > 4
    tenants = world.directory.tenants
    assert tenants is not None
    for tenant in tenants:
        assert tenant.taken <= 0.5 * tenants.limit(tenant)


def test_a_tenant_inside_its_limit_does_not_wait_behind_others() -> None:
    """Others may wait for ever; who has room gets it, in a look at all that wait."""
    world = full(1.0)
    tenants = world.directory.tenants
    assert tenants is not None
    lease = world.directory.begin_read(world.now, "reader")
    keys = [obj.key for some in world.directory.catalog.objects.slices() for obj in some]
    world.directory.read(keys, lease, world.now)  # nothing of anybody's may go
    tenants.set_quota("late", 4 * BATCH * SIZE)
    waiting = [world.ask("new", 0, scope_of(name)) for name in TENANTS]
    late = world.ask("k", 0, scope_of("late"))
    world.steps()
    assert late.settled
    world.end(late)
    assert all(wish.settled for wish in waiting)  # with TENANT_QUOTA_EXCEEDED: none of theirs may leave
