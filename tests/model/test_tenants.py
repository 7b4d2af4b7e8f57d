"""The accounts of tenants against what they really have, and that nothing of one moves another's.

- `used` and `reserved` are the sums over the tenant's values and open puts, after every step;
- no grant takes a tenant over its limit, and the limits never exceed the pool;
- a step on behalf of one tenant takes nothing from another that is inside its limit;
- a put inside the limit is granted at once while the pool is whole.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.directory import Directory
from mooncake.master.granting import Wish
from mooncake.master.membership import Client
from mooncake.master.objects import granules
from mooncake.master.pool import Segment
from mooncake.master.tenants.names import scope_of, split
from mooncake.master.tenants.registry import taken
from mooncake.rpc.messages import Found, Grant, Kill, PutOptions, Record, SegmentInfo
from mooncake.rpc.record_messages import Body
from mooncake.transfer.table import COMPLETE, REMOVED, WRITING

SIZE = 64 << 10
NAMES = ["a", "b", "c"]
TENANTS = st.sampled_from(NAMES)
LEASE_S = 10.0


class Server:
    """A segment's table: head slot → record.  It kills at once, unless it is slow."""

    def __init__(self, number: int) -> None:
        self.info = SegmentInfo(number, f"s{number}", SIZE, "", "", "h", f"server-{number}")
        self.rows: dict[int, Record] = {}
        self.term = 0
        self.mount: Segment | None = None
        self.slow = False
        self.unconfirmed: list[tuple[int, int]] = []


class TenantMachine(RuleBasedStateMachine):
    @initialize(segments=st.integers(1, 2), quotas=st.lists(st.sampled_from([16, 32, 64]), min_size=2, max_size=2))
    def start(self, segments: int, quotas: list[int]) -> None:
        random.seed(0)
        self.now = 1000.0
        self.quotas = {name: kib << 10 for name, kib in zip(NAMES, quotas, strict=False)}  # "c" has none
        self.servers = [Server(number + 1) for number in range(segments)]
        self.open: dict[int, tuple[str, Client]] = {}
        self.leases: list[int] = []
        self.new_master()

    def new_master(self) -> None:
        config = MasterConfig(tenant_quotas=self.quotas)
        wall = 1_700_000_000.0
        self.directory = Directory(config, Counters(), clock=lambda: self.now, wall=lambda: wall + self.now)
        self.client = self.directory.clients.arrive("1-1", "h")
        self.open.clear()
        self.leases.clear()
        for server in self.servers:
            self.connect(server)

    def connect(self, server: Server) -> None:
        def take(kill: Kill) -> None:
            dead = []
            for slot, seq, hide in zip(kill.slots, kill.seqs, kill.hide, strict=True):
                row = server.rows.get(slot)
                if row is not None and row.seq == seq:
                    row.state = REMOVED
                    if not hide:
                        del server.rows[slot]
                if not hide:
                    dead.append((slot, seq))
            server.unconfirmed += dead
            if not server.slow:
                self.confirm(server)

        server.unconfirmed.clear()
        server.mount, resumed = self.directory.mount(server.info, server.term, 10_000, take, self.now)
        server.term = self.directory.term
        if not resumed:
            for _ in self.directory.announce(server.mount, list(server.rows.values()), True):
                pass
        self.settle()

    def confirm(self, server: Server) -> None:
        dead, server.unconfirmed = server.unconfirmed, []
        if server.mount is not None:
            self.directory.killed(server.mount, [slot for slot, _ in dead], [seq for _, seq in dead])

    @rule(which=st.integers(0, 1), slow=st.booleans())
    def pace(self, which: int, slow: bool) -> None:
        """How soon a server confirms its kills."""
        server = self.servers[which % len(self.servers)]
        server.slow = slow
        if not slow:
            self.confirm(server)
            self.settle()

    def settle(self) -> None:
        directory = self.directory
        for _ in range(50):
            while directory.background:
                for _ in directory.background.popleft():
                    pass
            for segment, message in directory.pool.take_outbox():
                if segment.send is not None:
                    segment.send(message)
            if not directory.granting.serve(self.now) and not directory.pool.dirty:
                break

    def keys_of(self, name: str) -> set[str]:
        return {
            obj.key for some in self.directory.catalog.objects.slices() for obj in some if split(obj.key)[0] == name
        }

    def undisturbed(self, actor: str) -> dict[str, set[str]]:
        """What everybody else inside his limit has."""
        tenants = self.directory.tenants
        assert tenants is not None
        inside = [t.name for t in tenants if t.name != actor and t.taken <= tenants.limit(t)]
        return {name: self.keys_of(name) for name in inside}

    # -- steps

    @rule(
        name=TENANTS,
        keys=st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True),
        size=st.sampled_from([1, 300, 4096, 9000, 20_000]),
        copies=st.sampled_from([1, 1, 2]),
        hard=st.sampled_from([False] * 7 + [True]),
        soft=st.booleans(),
        group=st.sampled_from(["", "", "g"]),
        upsert=st.sampled_from([False, False, True]),
        small=st.booleans(),
    )
    def put(
        self, name: str, keys: list[int], size: int, copies: int, hard: bool, soft: bool, group: str, upsert: bool,
        small: bool,
    ) -> None:  # fmt: skip
        directory, tenants = self.directory, self.directory.tenants
        assert tenants is not None
        scope = scope_of(name)
        others = self.undisturbed(name)
        tenant = tenants.named(name)
        scoped = [f"{scope}{key}" for key in keys]
        if small:
            answer = directory.granting.grant_one(self.client, scoped[0], size, self.now, eager=False)
            answers, scoped = ([] if answer is None else [answer]), scoped[:1]
            options = PutOptions()
        else:
            groups = [scope + group] * len(keys) if group else []
            options = PutOptions(copies, hard_pin=hard, soft_pin_action=int(soft), groups=groups, upsert=upsert)
            fits = tenant is not None and tenant.held + 2 * len(keys) * granules(size) <= tenants.limit(tenant)
            idle = directory.pool.used == sum(each.held for each in tenants)  # the rest is of an earlier master's
            idle = idle and all(each.held <= tenants.limit(each) for each in tenants)
            waits = bool(directory.granting.waiting)
            wish = Wish(self.client, scoped, [size] * len(keys), options, groups, self.now + 0.7)
            directory.granting.ask(wish, self.now)
            self.settle()
            if not wish.settled:  # what it waits for does not come
                self.now += 1.0
                self.settle()
            assert wish.settled
            answers = wish.answers
            if fits and idle and not waits and copies == 1 and directory.pool.room()[0]:
                assert not {-200, -1700} & {a for a in answers if isinstance(a, int)}, answers
        registered = name in self.quotas
        for key, answer in zip(scoped, answers, strict=False):
            if isinstance(answer, Grant):
                assert registered
                self.take(key, size, answer, options)
            else:
                assert answer in ((-705, -600, -200, -1700) if registered else (-705, -600, -1701)), answer
        if any(isinstance(answer, Grant) for answer in answers):
            assert tenant is not None
            assert tenant.held <= tenants.limit(tenant)
        for other, had in others.items():
            assert self.keys_of(other) >= had, f"a put of {name} took values of {other}"

    def take(self, key: str, size: int, grant: Grant, options: PutOptions) -> None:
        group = options.groups[0] if options.groups else grant.kept.group if grant.kept else ""
        hard = options.hard_pin or bool(grant.kept and grant.kept.hard_pin)
        for number, parts in enumerate(grant.replicas):
            for j, part in enumerate(parts):
                body = Body(
                    key, size, part.extents, number, j, len(parts), group, hard, client="1-1", private=True
                )  # fmt: skip
                record = Record(part.slots, WRITING, self.directory.term, grant.seq, body)
                self.servers[part.segment - 1].rows[part.slots[0]] = record
        self.open[grant.seq] = key, self.client

    @rule(well=st.sampled_from([True, True, True, False]), last=st.booleans())
    def end(self, well: bool, last: bool) -> None:
        if not self.open:
            return
        seq = (max if last else min)(self.open)
        key, client = self.open.pop(seq)
        if well:
            for server in self.servers:
                for row in server.rows.values():
                    if row.seq == seq and row.state == WRITING:
                        row.state = COMPLETE
            code = self.directory.end_puts([seq], {}, client, self.now)[0]
            assert code in (0, -700, -712)
            if code == 0:
                assert self.directory.peek(key) is not None
        else:
            self.directory.revoke_puts([seq], client, self.now)
        self.settle()

    @rule(name=TENANTS, keys=st.lists(st.integers(0, 7), min_size=1, max_size=4), reads=st.booleans())
    def look(self, name: str, keys: list[int], reads: bool) -> None:
        scoped = [f"{scope_of(name)}{key}" for key in keys]
        if not reads:
            self.directory.exist(scoped, self.now)
            return
        lease = self.directory.begin_read(self.now, "1-1")
        found = self.directory.read(scoped, lease, self.now)
        assert all(isinstance(answer, Found | int) for answer in found)
        self.leases.append(lease.number)

    @rule()
    def hand_back(self) -> None:
        self.directory.end_read(self.leases, self.now, "1-1")
        self.leases.clear()
        self.settle()

    @rule(name=TENANTS, key=st.integers(0, 7), force=st.booleans())
    def remove(self, name: str, key: int, force: bool) -> None:
        others = self.undisturbed(name)
        self.directory.remove([f"{scope_of(name)}{key}"], force, self.now)
        self.settle()
        assert all(self.keys_of(other) == had for other, had in others.items())

    @rule(name=TENANTS, force=st.booleans(), pattern=st.sampled_from(["", "^[0-3]$"]))
    def remove_all(self, name: str, force: bool, pattern: str) -> None:
        others = self.undisturbed(name)
        scope = scope_of(name)
        steps = (
            self.directory.remove_regex(pattern, force, scope) if pattern else self.directory.remove_all(force, scope)
        )
        for _ in steps:
            pass
        self.settle()
        if force and not pattern:
            assert not self.keys_of(name)
        assert all(self.keys_of(other) == had for other, had in others.items())

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        tenants = self.directory.tenants
        assert tenants is not None
        self.now += seconds
        for server in self.servers:
            if server.mount is not None and server.mount.mounted:
                self.directory.heartbeat(server.mount, self.now)
        below = {t.name: self.keys_of(t.name) for t in tenants if t.taken <= 0.9 * tenants.limit(t)}
        self.directory.tick(self.now)
        while self.directory.granting.evict_ahead(self.now):
            pass
        self.settle()
        for name, had in below.items():
            assert self.keys_of(name) == had, f"{name} lost values below the watermark of its limit"

    @rule(name=st.sampled_from(NAMES[:2]), kib=st.sampled_from([8, 32, 64]))
    def set_quota(self, name: str, kib: int) -> None:
        tenants = self.directory.tenants
        assert tenants is not None
        self.quotas[name] = kib << 10
        tenants.set_quota(name, kib << 10)

    @rule()
    def lose_a_segment(self) -> None:
        server = self.servers[-1]
        if len(self.servers) > 1 and server.mount is not None and server.mount.mounted:
            self.directory.unmount(server.mount, self.now)
            server.rows.clear()
            server.term = 0
            self.settle()

    @rule()
    def mount_again(self) -> None:
        for server in self.servers:
            if server.mount is None or not server.mount.mounted:
                self.connect(server)

    @rule()
    def restart(self) -> None:
        self.now += 1.0
        before = {
            row.body.key
            for server in self.servers
            if server.mount is not None and server.mount.mounted
            for row in server.rows.values()
            if row.state == COMPLETE and row.body.parts == 1
        }
        self.new_master()
        assert {key for name in NAMES for key in self.keys_of(name)} >= before

    # -- always

    @invariant()
    def accounts(self) -> None:
        if not hasattr(self, "directory"):
            return
        directory, tenants = self.directory, self.directory.tenants
        assert tenants is not None
        used: dict[str, int] = {}
        counts: dict[str, int] = {}
        for some in directory.catalog.objects.slices():
            for obj in some:
                name = split(obj.key)[0]
                used[name] = used.get(name, 0) + taken(obj)
                counts[name] = counts.get(name, 0) + 1
        reserved: dict[str, int] = {}
        for put in directory.puts.by_seq.values():
            name = split(put.obj.key)[0]
            reserved[name] = reserved.get(name, 0) + taken(put.obj)
        for tenant in tenants:
            expected = used.get(tenant.name, 0), reserved.get(tenant.name, 0), counts.get(tenant.name, 0)
            assert (tenant.used, tenant.reserved, tenant.objects) == expected, tenant.name
            assert tenant.leaving == 0
            doomed = [d for s in directory.pool.segments.values() for d in s.doomed.values() if d.account is tenant]
            assert tenant.quarantined == sum(d.part.taken for d in doomed)
        assert set(used) <= {tenant.name for tenant in tenants}
        assert sum(tenants.limit(tenant) for tenant in tenants) <= max(1, tenants.capacity())


TestTenants = TenantMachine.TestCase
TestTenants.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
