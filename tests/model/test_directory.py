"""The directory against a simple model, with simulated clients, segment servers and clock.

The servers' tables are the ground truth of safety:
  - a grant never overlaps a record that its owner has not killed yet, nor uses its slots;
  - no record is killed while a read lease that some reader holds is on it, under whichever master it was given;
and the model's of meaning: what is complete, leased, pinned, removed, evictable, lost, allowed to come back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake.errors import StoreError
from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.directory import Directory
from mooncake.master.granting import Wish
from mooncake.master.membership import Client
from mooncake.master.pool import Segment
from mooncake.rpc.messages import Found, Grant, Kill, PutOptions, Record, SegmentInfo
from mooncake.rpc.record_messages import Body
from mooncake.transfer.table import COMPLETE, GRANULE, REMOVED, WRITING

TTL = 10.0
KEYS = [f"key-{i}" for i in range(9)]
SEGMENT_SIZE = 64 << 10
CONFIG = MasterConfig(client_ttl_s=10.0)


@dataclass
class Row:
    """One record of a table."""

    state: int
    term: int
    seq: int
    slots: list[int]
    body: Body
    revoked: bool = False


class Server:
    """A segment server: its table, and the kills that it has not carried out yet."""

    def __init__(self, number: int, host: str) -> None:
        self.info = SegmentInfo(number, f"{host}:{number}", SEGMENT_SIZE, "", "", host, f"server-{number}")
        self.rows: dict[int, Row] = {}
        self.kills: list[tuple[int, int]] = []
        self.term = 0
        self.mount: Segment | None = None
        self.away_since: float | None = None

    def spans(self) -> list[tuple[int, int]]:
        return [
            (row.body.extents[i], row.body.extents[i] + -(-row.body.extents[i + 1] // GRANULE) * GRANULE)
            for row in self.rows.values()
            for i in range(0, len(row.body.extents), 2)
        ]


@dataclass
class Value:
    """One acknowledged value of the model."""

    seq: int
    size: int
    replicas: list[list[tuple[int, int]]]  # (segment, head slot) of each part
    written: list[list[tuple[int, int]]]  # as replicas, with those on lost segments, which may come back
    hard: bool
    soft_until: float
    group: str
    leased_until: float = 0.0
    dormant: bool = False  # on lost segments only: may come back


@dataclass
class OpenPut:
    key: str
    value: Value
    client: Client
    started: float


@dataclass
class Reading:
    """A read lease that some reader holds: the records it may be looking at."""

    number: int
    until: float
    records: set[tuple[int, int, int]] = field(default_factory=set)  # (segment, head slot, seq)
    keys: dict[str, int] = field(default_factory=dict)
    term: int = 0


class DirectoryMachine(RuleBasedStateMachine):
    @initialize(hosts=st.lists(st.sampled_from(["h1", "h2"]), min_size=1, max_size=3))
    def start(self, hosts: list[str]) -> None:
        random.seed(0)
        self.now = 1000.0
        self.wall_offset = 1_700_000_000.0
        self.values: dict[str, Value] = {}
        self.open: dict[int, OpenPut] = {}
        self.readings: list[Reading] = []
        self.wishes: list[Wish] = []
        self.group_leases: dict[str, float] = {}
        self.servers = {number: Server(number, host) for number, host in enumerate(hosts, start=1)}
        self.new_master()
        for server in self.servers.values():
            self.connect(server)

    # -- the world

    def new_master(self) -> None:
        self.directory = Directory(CONFIG, Counters(), clock=lambda: self.now, wall=lambda: self.wall_offset + self.now)
        self.clients = [self.directory.clients.arrive(f"client-{i}", f"h{i + 1}") for i in range(2)]

    def connect(self, server: Server) -> None:
        def take_kill(kill: Kill) -> None:
            self.take_kill(server, kill)

        try:
            segment, resumed = self.directory.mount(server.info, server.term, int(TTL * 1000), take_kill, self.now)
        except StoreError:
            segment, resumed = self.directory.mount(server.info, server.term, int(TTL * 1000), take_kill, self.now)
        server.mount, server.away_since = segment, None
        server.term = self.directory.term
        if not resumed:
            server.kills.clear()
            records = [Record(r.slots, r.state, r.term, r.seq, r.body) for r in server.rows.values()]
            half = len(records) // 2
            for some, last in ((records[:half], False), (records[half:], True)):
                for _ in self.directory.announce(segment, some, last):
                    pass
        self.settle_world()

    def take_kill(self, server: Server, kill: Kill) -> None:
        for slot, seq, hide in zip(kill.slots, kill.seqs, kill.hide, strict=True):
            row = server.rows.get(slot)
            if row is not None and row.seq == seq:
                if hide:
                    row.state = REMOVED
                    continue
                if row.state == WRITING:
                    row.revoked = True
                else:
                    for reading in self.readings:
                        assert (server.info.segment, slot, seq) not in reading.records, "killed under a read lease"
                    row.state = REMOVED  # from then on it is announced to nobody as a value
            if not hide:
                server.kills.append((slot, seq))

    def settle_world(self) -> None:
        """After each step: background work, kills on their way, wishes that were settled."""
        while self.directory.background:
            for _ in self.directory.background.popleft():
                pass
        self.flush()
        for wish in list(self.wishes):
            if wish.settled:
                self.wishes.remove(wish)
                self.take_grants(wish)
        self.find_lost()
        self.find_evicted()

    def flush(self) -> None:
        for segment, kill in self.directory.pool.take_outbox():
            if segment.send is not None:
                segment.send(kill)

    def mounted(self, number: int) -> bool:
        segment = self.servers[number].mount
        return segment is not None and segment.mounted

    def find_lost(self) -> None:
        for value in self.values.values():
            whole = [r for r in value.replicas if all(self.mounted(number) for number, _ in r)]
            if not value.dormant:
                value.replicas = whole or value.replicas
                value.dormant = not whole

    def find_evicted(self) -> None:
        for key, value in list(self.values.items()):
            if self.directory.peek(key) is not None or value.dormant:
                continue
            members = [v for v in self.values.values() if v is value or (value.group and v.group == value.group)]
            for member in members:
                breakable = member.leased_until - TTL <= self.now - 2
                assert member.leased_until <= self.now or breakable, f"{key} evicted under a lease"
                assert not member.hard, f"{key} evicted though hard-pinned"
            for reading in self.readings:
                if reading.term == self.directory.term:
                    assert not any(reading.keys.get(k) == v.seq for k, v in self.values.items() if v in members)
            if value.group:
                for seq, put in self.open.items():
                    assert put.value.group != value.group or seq not in self.directory.puts.by_seq
            del self.values[key]

    # -- puts

    @rule(
        who=st.integers(0, 1),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
        sizes=st.lists(st.sampled_from([1, 300, 4096, 9000, 20_000, 50_000, 70_000]), min_size=4, max_size=4),
        copies=st.integers(1, 2),
        hard=st.sampled_from([False] * 7 + [True]),
        soft=st.booleans(),
        group=st.sampled_from(["", "", "g1", "g2"]),
    )
    def put_start(
        self, who: int, keys: list[str], sizes: list[int], copies: int, hard: bool, soft: bool, group: str
    ) -> None:
        groups = [group] * len(keys) if group else []
        options = PutOptions(copies, hard_pin=hard, soft_pin_action=int(soft), groups=groups)
        wish = Wish(self.clients[who], keys, sizes[: len(keys)], options, groups, self.now + CONFIG.put_wait_s)
        self.wishes.append(wish)
        self.directory.granting.ask(wish, self.now)
        self.settle_world()

    def take_grants(self, wish: Wish) -> None:
        seen: set[str] = set()
        assert wish.options is not None
        for i, (key, answer) in enumerate(zip(wish.keys, wish.answers, strict=True)):
            if isinstance(answer, Grant):
                assert key not in seen
                self.take_grant(wish, i, answer)
            elif answer == -705:
                known = self.values.get(key)
                assert key in seen or (known is not None and not known.dormant) or self.is_open(key) or self.now
            else:
                assert answer == -200
            seen.add(key)

    def is_open(self, key: str) -> bool:
        return any(put.key == key for put in self.open.values())

    def take_grant(self, wish: Wish, i: int, grant: Grant) -> None:
        key, size = wish.keys[i], wish.sizes[i]
        options = wish.options
        assert options is not None
        value = Value(grant.seq, size, [], [], options.hard_pin, 0.0, wish.groups[i] if wish.groups else "")
        used: list[set[int]] = []
        for number, parts in enumerate(grant.replicas):
            numbers = {part.segment for part in parts}
            assert len(numbers) == len(parts)
            assert not any(numbers & others for others in used), "replicas share a segment"
            used.append(numbers)
            assert sum(sum(part.extents[1::2]) for part in parts) == size
            for j, part in enumerate(parts):
                server = self.servers[part.segment]
                body = Body(
                    key, size, part.extents, number, j, len(parts), value.group, options.hard_pin,
                    client=wish.client.name,
                )  # fmt: skip
                taken = server.spans()
                for at in range(0, len(part.extents), 2):
                    start, end = part.extents[at], part.extents[at] + part.extents[at + 1]
                    assert end <= SEGMENT_SIZE
                    assert not any(start < b and a < end for a, b in taken), "granted bytes that are in use"
                slots = {slot for row in server.rows.values() for slot in row.slots}
                assert not slots & set(part.slots), "granted slots that are in use"
                server.rows[part.slots[0]] = Row(WRITING, self.directory.term, grant.seq, part.slots, body)
            value.replicas.append([(part.segment, part.slots[0]) for part in parts])
        old = next((seq for seq, put in self.open.items() if put.key == key), None)
        if old is not None:  # only a put that was too old makes way for another
            del self.open[old]
        if key in self.values:
            assert self.values[key].dormant
        self.open[grant.seq] = OpenPut(key, value, wish.client, self.now)

    @precondition(lambda self: self.open)
    @rule(choice=st.randoms(), lose=st.booleans())
    def put_end(self, choice: random.Random, lose: bool) -> None:
        seq = choice.choice(sorted(self.open))
        put = self.open.pop(seq)
        value = put.value
        lost = {seq: {1}} if lose and len(value.replicas) > 1 else {}
        if lost:
            value.replicas = value.replicas[:1]
        alive = [r for r in value.replicas if all(self.is_writable(number, slot, seq) for number, slot in r)]
        for replica in value.replicas:
            rows = [self.servers[number].rows.get(slot) for number, slot in replica]
            if all(row is not None and row.seq == seq and not row.revoked for row in rows):
                value.written.append(replica)
                for row in rows:
                    if row is not None:
                        row.state = COMPLETE
        other = next(c for c in self.clients if c is not put.client)
        assert self.directory.end_puts([seq], lost, other, self.now) in ([-601], [-700])
        code = self.directory.end_puts([seq], lost, put.client, self.now)[0]
        if alive and code == -700:
            assert self.now - put.started >= CONFIG.put_start_discard_timeout_s
        elif alive:
            assert code == 0
            value.replicas = alive
            self.values[put.key] = value
            assert self.directory.end_puts([seq], {}, put.client, self.now) == [0]
        else:
            assert code in (-700, -712)
            value.dormant = True  # its segment may bring it back, though it was not acknowledged
            self.values.setdefault(put.key, value)
        self.settle_world()

    def is_writable(self, number: int, slot: int, seq: int) -> bool:
        row = self.servers[number].rows.get(slot)
        return self.mounted(number) and row is not None and row.seq == seq and not row.revoked

    @precondition(lambda self: self.open)
    @rule(choice=st.randoms())
    def put_revoke(self, choice: random.Random) -> None:
        seq = choice.choice(sorted(self.open))
        put = self.open.pop(seq)
        assert self.directory.revoke_puts([seq], put.client, self.now)[0] in (0, -700)
        assert self.directory.revoke_puts([seq], put.client, self.now) == [-700]
        self.settle_world()

    # -- reads

    def lease(self, keys: list[str]) -> None:
        until = self.now + TTL + 0.01
        groups = {self.values[key].group for key in keys} - {""}
        self.group_leases |= dict.fromkeys(groups, until)  # also for members that come later
        for key, value in self.values.items():
            if key in keys or value.group in groups:
                value.leased_until = until

    def there(self, key: str) -> bool:
        return key in self.values and not self.values[key].dormant

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=5))
    def exist(self, keys: list[str]) -> None:
        found = self.directory.exist(keys, self.now)
        assert list(found) == [self.there(key) for key in keys]
        self.lease([key for key in keys if self.there(key)])

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True), query=st.booleans())
    def get(self, keys: list[str], query: bool) -> None:
        if query:
            answers = self.directory.query(keys, self.now)
        else:
            lease = self.directory.begin_read(self.now)
            answers = self.directory.read(keys, lease, self.now)
            reading = Reading(lease.number, self.now + TTL, term=self.directory.term)
            self.readings.append(reading)
        for key, answer in zip(keys, answers, strict=True):
            if not self.there(key):
                assert answer == -704 or (answer == -703 and key in self.directory.puts.by_key)
                continue
            value = self.values[key]
            assert isinstance(answer, Found)
            assert answer.size == value.size
            expected = sorted(
                [x for number, slot in replica for x in self.place(number, slot)] for replica in value.replicas
            )
            assert sorted(answer.places) == expected
            assert answer.states == ([3] * len(expected) if query else [])
            if not query:
                reading.keys[key] = value.seq
                reading.records |= {(number, slot, value.seq) for r in value.replicas for number, slot in r}
        self.lease([key for key in keys if self.there(key)])

    def place(self, number: int, slot: int) -> list[int]:
        extents = self.servers[number].rows[slot].body.extents
        return [x for i in range(0, len(extents), 2) for x in (number, extents[i], extents[i + 1])]

    @precondition(lambda self: self.readings)
    @rule(choice=st.randoms())
    def lease_return(self, choice: random.Random) -> None:
        reading = self.readings.pop(choice.randrange(len(self.readings)))
        self.directory.end_read([reading.number], self.now)
        self.settle_world()

    # -- removals

    @rule(key=st.sampled_from(KEYS), force=st.booleans())
    def remove(self, key: str, force: bool) -> None:
        code = self.directory.remove([key], force, self.now)[0]
        value = self.values.get(key)
        if value is None or value.dormant:
            if key in self.directory.puts.by_key:
                assert code == -703
                return
            assert code == -704
            self.values.pop(key, None)  # and its segment shall not revive it
        elif not force and (value.leased_until > self.now or self.is_read(key)):
            assert code == -706 or value.leased_until - TTL <= self.now - 2  # perhaps broken for a put
            if code == 0:
                del self.values[key]
        elif code == -706:
            assert not force
            assert self.group_leases.get(value.group, 0.0) > self.now
        else:
            assert code == 0
            del self.values[key]
        self.settle_world()

    def is_read(self, key: str) -> bool:
        seq = self.values[key].seq
        return any(r.keys.get(key) == seq and r.term == self.directory.term for r in self.readings)

    @rule(force=st.booleans(), last=st.sampled_from([None, *"0123"]))
    def remove_many(self, force: bool, last: str | None) -> None:
        steps = self.directory.remove_all(force) if last is None else self.directory.remove_regex(f"-{last}$", force)
        there = [key for key in self.values if self.there(key) and (last is None or key.endswith(last))]
        removed = 0
        while True:
            try:
                next(steps)
            except StopIteration as end:
                removed = end.value
                break
        gone = [key for key in there if self.directory.peek(key) is None]
        assert removed == len(gone)
        for key in there:
            value = self.values[key]
            leased = max(value.leased_until, self.group_leases.get(value.group, 0.0)) > self.now
            if force or not (leased or self.is_read(key)):
                assert key in gone
            elif key in gone:
                assert value.leased_until - TTL <= self.now - 2
        for key in gone:
            del self.values[key]
        if force and last is None:
            self.values = {key: value for key, value in self.values.items() if not value.dormant}
        self.settle_world()

    # -- time and failures

    @rule(seconds=st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.5, 6.0, 9.0, 31.0]))
    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            self.readings = [r for r in self.readings if r.until > self.now]
            for server in self.servers.values():
                if server.mount is not None and server.away_since is None:
                    self.directory.heartbeat(server.mount, self.now)
            self.directory.tick(self.now)
            self.directory.granting.serve(self.now)
            self.directory.granting.evict_ahead(self.now)
            self.settle_world()
            if self.now >= end:
                break
            self.now = min(end, self.now + 0.5)

    @rule(number=st.integers(1, 3), most=st.integers(1, 5))
    def confirm(self, number: int, most: int) -> None:
        server = self.servers.get(number)
        if server is None or server.mount is None or server.away_since is not None:
            return
        some, server.kills = server.kills[:most], server.kills[most:]
        for slot, seq in some:
            if slot in server.rows and server.rows[slot].seq == seq:
                del server.rows[slot]
        self.directory.killed(server.mount, [slot for slot, _ in some], [seq for _, seq in some])
        self.directory.granting.serve(self.now)
        self.settle_world()

    @rule(number=st.integers(1, 3))
    def lose_connection(self, number: int) -> None:
        server = self.servers.get(number)
        if server is not None and server.mount is not None and server.away_since is None:
            server.away_since = self.now
            server.kills.clear()  # lost on the way, or will be sent again
            self.directory.disconnect(server.mount, self.now)
            self.settle_world()

    @rule(number=st.integers(1, 3))
    def return_(self, number: int) -> None:
        server = self.servers.get(number)
        if server is not None and server.away_since is not None:
            self.connect(server)
            self.after_return()

    def after_return(self) -> None:
        """Values that wait for their segments come back with them, and replicas that were lost."""
        for key, value in self.values.items():
            found = self.directory.peek(key)
            if found is None:
                continue
            before = [] if value.dormant else value.replicas
            listed = [r for r in value.written if self.place_of(r) in found.places]
            assert len(listed) == len(found.places), f"{key} is not what was put"
            assert all(self.is_filled(number) for replica in listed for number, _ in replica)
            assert all(replica in listed for replica in before)
            value.replicas = listed
            if value.dormant:
                value.dormant, value.leased_until = False, 0.0
        for key in KEYS:
            if self.directory.peek(key) is not None:
                assert self.there(key), f"{key} was revived"

    def is_filled(self, number: int) -> bool:
        segment = self.servers[number].mount
        return segment is not None and segment.mounted and segment.filled

    def place_of(self, replica: list[tuple[int, int]]) -> list[int]:
        return [x for number, slot in replica if slot in self.servers[number].rows for x in self.place(number, slot)]

    def knows_all(self) -> bool:
        """Whether no segment is away that has yet to hear of a removal: a master that ends takes that with it."""
        known = {value.seq for value in self.values.values()} | set(self.open)
        return all(
            row.state != COMPLETE or row.seq in known
            for server in self.servers.values()
            for row in server.rows.values()
        )

    @precondition(knows_all)
    @rule(gap=st.sampled_from([-5.0, 0.5, 3.0]))
    def restart_master(self, gap: float) -> None:
        """Also with a clock that went back."""
        acknowledged = {key: value for key, value in self.values.items() if not value.dormant}
        self.wishes.clear()
        for put in self.open.values():  # their writers find out and stop
            del put
        self.open.clear()
        self.wall_offset += gap
        self.now += 0.5
        away = [server for server in self.servers.values() if server.away_since is not None]
        for value in self.values.values():
            value.dormant = True
            value.leased_until = 0.0
        for server in self.servers.values():
            server.mount = None
        self.new_master()
        for server in self.servers.values():
            if server not in away:
                self.connect(server)
        for server in self.servers.values():  # those that were told an old term come again
            if server not in away and server.term != self.directory.term:
                self.connect(server)
        self.after_return()
        for key, value in acknowledged.items():
            if any(all(self.is_filled(number) for number, _ in replica) for replica in value.replicas):
                assert self.there(key), f"{key} was acknowledged and is lost"

    # -- always

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "directory"):
            return
        totals = self.directory.totals()
        assert totals.key_count == sum(self.there(key) for key in KEYS)
        assert totals.allocated_bytes <= totals.capacity_bytes
        for server in self.servers.values():
            segment = server.mount
            if segment is None or not segment.mounted:
                continue
            taken = sum(end - start for start, end in server.spans())
            assert segment.allocator.used == taken, "bytes leaked or freed too early"
            assert segment.quarantined >= 0
            assert segment.coming >= 0

    def teardown(self) -> None:
        """Whatever happened: afterwards all is as at the start."""
        if not hasattr(self, "directory"):
            return
        for number, server in self.servers.items():
            if server.away_since is not None:
                self.return_(number)
        for put in list(self.open):
            self.directory.revoke_puts([put], self.open.pop(put).client, self.now)
        self.settle_world()
        for _ in self.directory.remove_all(True):
            pass
        self.values.clear()
        self.wait(31.0)
        self.wait(60.0)
        for _ in range(40):
            for number in self.servers:
                self.confirm(number, 5)
        self.wait(31.0)
        for put in list(self.open):
            self.directory.revoke_puts([put], self.open.pop(put).client, self.now)
        for _ in range(40):
            self.settle_world()
            for number in self.servers:
                self.confirm(number, 5)
        totals = self.directory.totals()
        assert totals.allocated_bytes == 0
        assert totals.quarantined_bytes == 0
        assert totals.read_leases == 0
        assert totals.soft_pinned == 0
        assert not self.directory.catalog.groups


DirectoryMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestDirectory = DirectoryMachine.TestCase
