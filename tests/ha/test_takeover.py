"""Masters that lose their leader, or their back end, while a pool is in use."""

import signal
import threading
import time

import pytest
import redis

from mooncake.store import MooncakeDistributedStore
from tests.ha.backends import Backend
from tests.ha.pool import LEASE, Pool, health, seconds_until
from tests.ha.switch import Switch
from tests.processes import stop, wait_until

MIB = 1 << 20
TAKEOVER = LEASE + 3


def value(number: int) -> bytes:
    return number.to_bytes(8, "little") * (500 + number % 700)


class Load(threading.Thread):
    """Puts and gets without end.  `kept`: numbers of acknowledged values; `wrong`: what was read and never put."""

    def __init__(self, store: MooncakeDistributedStore) -> None:
        super().__init__(daemon=True)
        self.store = store
        self.kept: list[int] = []
        self.wrong: list[str] = []
        self.longest = 0.0
        self.good_at = 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            started = time.monotonic()
            if self.store.put(f"k{number}", value(number)) == 0:
                self.kept.append(number)
            if self.kept:
                one = self.kept[number * 7919 % len(self.kept)]
                found = self.store.get(f"k{one}")
                if found:
                    self.good_at = time.monotonic()
                if found not in (b"", value(one)):
                    self.wrong.append(f"k{one}")
            self.longest = max(self.longest, time.monotonic() - started)
            time.sleep(0.002)

    def end(self) -> None:
        self._ended.set()
        self.join(20)
        assert not self.is_alive(), "a call does not end"


@pytest.fixture
def load(make_pool, cleanup):
    """Of a pool; its clients follow the leader."""
    loads = []

    def make(pool: Pool, segment: int = 256 * MIB) -> Load:
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 16 * MIB, "tcp", "", pool.backend.address) == 0
        cleanup.callback(store.close)
        made = Load(store)
        loads.append(made)
        made.start()
        wait_until(lambda: len(made.kept) > 50, what="some values")
        return made

    yield make
    for one in loads:
        if one.is_alive():
            one.end()


def check(load: Load) -> None:
    """Every acknowledged value is there, with the right bytes, for the client that lived through it all."""
    load.end()
    assert load.wrong == []
    assert load.longest < 6.0, "each call ends within its limit"
    store = load.store
    wait_until(lambda: store.is_exist(f"k{load.kept[0]}") == 1, what="the first value")
    missing = [number for number in load.kept if store.get(f"k{number}") != value(number)]
    assert missing == []


def test_a_leader_that_is_killed(backend, make_pool, load):
    pool = make_pool(backend, 3)
    running = load(pool)
    leader = pool.leader()
    leader.kill()
    killed = time.monotonic()
    pool.masters.remove(leader)
    new = pool.leader()
    wait_until(lambda: running.good_at > killed + 1, TAKEOVER, "a good get")
    assert time.monotonic() - killed < TAKEOVER
    assert len(pool.leaders()) == 1
    assert health(new)["view_version"] > 0
    wait_until(lambda: running.kept and len(running.kept) > 100, what="more values")
    check(running)


def test_a_leader_that_is_told_to_end_is_followed_at_once(make_backend, make_pool, load):
    pool = make_pool(make_backend("redis"))
    running = load(pool)
    leader = pool.leader()
    leader.signal(signal.SIGTERM)
    assert leader.process.wait(5) == 0
    pool.masters.remove(leader)
    assert seconds_until(pool.leaders, 5, "another leader") < 2.5
    ended = time.monotonic()
    wait_until(lambda: running.good_at > ended, 3, "a good get")
    check(running)


@pytest.mark.slow
def test_a_leader_that_is_stopped_past_its_lease_and_goes_on(backend, make_pool, load):
    """Two that think they lead, as long as it takes the old one to look at its clock: no request."""
    pool = make_pool(backend)
    running = load(pool)
    old = pool.leader()
    pid = old.process.pid
    stop(pid)
    stopped = time.monotonic()
    pool.leader(TAKEOVER, but=old)
    wait_until(lambda: running.good_at > stopped + 1, TAKEOVER, "a good get")
    old.signal(signal.SIGCONT)
    wait_until(lambda: health(old).get("role") == "standby", 5, "the old leader as a standby")
    assert old.process.poll() is None
    assert old.process.pid == pid
    assert "This master leads no longer" in pool.log(old)
    leader = health(pool.leader())["leader_address"]
    wait_until(lambda: health(old).get("leader_address") == leader, 5, "its knowledge of the leader")
    time.sleep(1)
    check(running)


@pytest.mark.slow
def test_a_leader_that_is_cut_off_from_the_back_end(make_backend, make_pool, load, cleanup, tmp_path):
    """It stops serving before another one can be elected."""
    backend = make_backend("redis")
    switch = Switch(backend.service.port)
    cleanup.callback(switch.close)
    cut = Backend.__new__(Backend)
    cut.kind, cut.service = "redis", backend.service
    cut.address = backend.address.replace(str(backend.service.port), str(switch.own_port))
    cut.flags = (*backend.flags[:2], f"--ha_backend_connstring={cut.address}")
    pool = Pool(backend, tmp_path)
    cleanup.callback(pool.stop)
    old = pool.add_master(backend=cut)
    pool.leader()
    other = pool.add_master()
    running = load(pool)
    switch.silence()
    cut_off = time.monotonic()
    while health(other).get("role") != "leader":
        assert time.monotonic() < cut_off + TAKEOVER
        time.sleep(0.01)
    assert health(old).get("role") != "leader"
    wait_until(lambda: running.good_at > cut_off + LEASE, TAKEOVER, "a good get")
    wait_until(lambda: health(old).get("ha_state") == "disconnected", what="the old one's state")
    switch.turn(backend.service.port)
    wait_until(lambda: health(old).get("ha_state") == "standby", what="the old one as a standby")
    check(running)


@pytest.mark.slow
def test_a_back_end_that_is_stopped_for_long(backend, make_pool, load):
    """Nobody leads in the end; a leader exists again within two leases after it goes on."""
    pool = make_pool(backend)
    running = load(pool)
    backend.service.freeze()
    wait_until(lambda: not pool.leaders(), LEASE + 2, "the leader's end")
    time.sleep(2 * LEASE)
    assert pool.leaders() == []
    assert {health(master)["ha_state"] for master in pool.masters} == {"disconnected"}
    backend.service.thaw()
    assert seconds_until(pool.leaders, 2 * LEASE, "a leader") < 2 * LEASE
    thawed = time.monotonic()
    wait_until(lambda: running.good_at > thawed, 5, "a good get")
    check(running)


@pytest.mark.slow
@pytest.mark.parametrize("away", [0.0, 8.0], ids=["at once", "after the lease"])
def test_a_back_end_that_is_killed_and_started(backend, make_pool, load, away):
    """Redis forgets everything then."""
    pool = make_pool(backend)
    running = load(pool)
    before = health(pool.leader())["view_version"]
    backend.service.kill()
    time.sleep(away)
    backend.service.start()
    started = time.monotonic()
    seconds_until(lambda: pool.leaders() and running.good_at > started + 2, 2 * LEASE + 2, "a leader that serves")
    assert health(pool.leader())["view_version"] >= before
    check(running)


@pytest.mark.slow
def test_a_back_end_that_forgets_who_leads_again_and_again(make_backend, make_pool, load):
    """For up to a second two lead each time; in a pool that is full, so that room is given out again and again."""
    backend = make_backend("redis")
    pool = make_pool(backend, 3, "--default_kv_lease_ttl=500ms")
    loads = [load(pool, 4 * MIB) for _ in range(2)]
    terms = {health(pool.leader())["view_version"]}
    direct = redis.Redis(port=backend.service.port, db=3, password="a secret")
    for _ in range(6):
        direct.flushdb()
        time.sleep(1.5)
        wait_until(lambda: len(pool.leaders()) == 1, 10, "one leader")
        terms.add(health(pool.leader())["view_version"])
        good = time.monotonic()
        wait_until(lambda good=good: all(one.good_at > good for one in loads), 10, "good gets")
    for one in loads:
        one.end()
    assert [one.wrong for one in loads] == [[], []]
    assert len(terms) == 7


@pytest.mark.slow
def test_a_client_without_the_back_end(make_backend, make_pool, make_store):
    """One that was given the leader's own address keeps its segment."""
    pool = make_pool(make_backend("redis"))
    leader = pool.leader()
    store = make_store(16 * MIB, at=leader)
    assert store.put("k", b"v" * MIB) == 0
    time.sleep(31)  # three times client_ttl
    assert store.get("k") == b"v" * MIB
    assert len(leader.ask("GET", "/get_segments_detail")[1]["segments"]) == 1
