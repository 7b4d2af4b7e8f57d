"""What a master publishes: the form of its events, and one for every way in which a value comes and goes."""

import asyncio
import contextlib
import json
import socket
import subprocess
import time

import pytest

from mooncake.errors import ConfigError
from mooncake.master.counters import Counters
from mooncake.master.kv_events import KvEvents
from mooncake.master.kv_publisher import KvPublisher, _signed, hash_in
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from tests.events.subscriber import Subscriber
from tests.processes import BIN, Master, free_port, wait_until

MIB = 1 << 20
STORED, REMOVED, CLEARED = "stored", "removed", ("cleared", None, None)
KEYS = ["a", "b", "c"]


def stored(*keys: str) -> list[tuple]:
    return [(STORED, key, "cpu") for key in keys]


def removed(*keys: str) -> list[tuple]:
    return [(REMOVED, key, "cpu") for key in keys]


def status(master) -> dict:
    return json.loads(master.get("/kv_events/status"))


@pytest.fixture(scope="module")
def shared():
    """(master, store, subscriber), the last of which hears."""
    with contextlib.ExitStack() as stack:
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        flags = ["--enable_kv_events", f"--kv_events_bind_endpoint={endpoint}", "--kv_events_backend_id=pool-1"]
        master = Master(*flags, "--default_kv_lease_ttl=60s")
        stack.callback(master.stop)
        store = MooncakeDistributedStore()
        stack.callback(store.close)
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 * MIB, 32 * MIB, "tcp", "", master.address) == 0
        subscriber = Subscriber(endpoint)
        stack.callback(subscriber.close)
        subscriber.join(store)
        yield master, store, subscriber


@pytest.fixture
def pool(shared):
    """The same, empty and with nothing heard."""
    yield shared
    _, store, subscriber = shared
    store.remove_all(force=True)
    subscriber.wait_for(lambda: subscriber.events and subscriber.told()[-1] == CLEARED, "the end of the test")
    subscriber.forget()


# ---------------------------------------------------------------- the form


def test_form(pool):
    _, store, subscriber = pool
    before = int(time.time() * 1000)
    assert store.put("1234", b"x") == 0
    subscriber.wait_for(lambda: len(subscriber.events) == 1)
    ((stamp, (event,), rank),) = subscriber.batches
    assert before <= stamp <= time.time() * 1000
    assert rank == 0
    assert before <= event["timestamp"] <= stamp
    assert isinstance(event["event_id"], int)
    assert event == {
        "event_id": event["event_id"],
        "timestamp": event["timestamp"],
        "event_type": "stored",
        "type": "BlockStored",
        "model_name": None,
        "block_size": None,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": "default",
        "backend_id": "pool-1",
        "group_id": "",
        "medium": "cpu",
        "dp_rank": None,
        "object_key": "1234",
        "parent_hash": None,
        "token_ids": None,
        "seq_hashes": [1234],
        "block_hashes": [1234],
        "base_block_idx": 0,
    }
    subscriber.forget()
    assert store.remove("1234") == 0
    subscriber.wait_for(lambda: len(subscriber.events) == 1)
    (after,) = subscriber.events
    assert (after["event_type"], after["type"], after["base_block_idx"]) == ("removed", "BlockRemoved", None)
    assert after["seq_hashes"] == [1234]
    assert after["event_id"] == event["event_id"] + 1


@pytest.mark.parametrize(
    ("key", "unsigned", "signed"),
    [
        ("0", [0], [0]),
        ("0x1F", [31], [31]),
        ("18446744073709551615", [(1 << 64) - 1], [-1]),
        ("0xffffffffffffffff", [(1 << 64) - 1], [-1]),
        ("18446744073709551616", [], []),
        ("0x", [], []),
        ("-1", [], []),
        ("1_0", [], []),
        ("١", [], []),
        ("model@7", [], []),
    ],
)
def test_hashes_in_keys(key, unsigned, signed):
    value = hash_in(key)
    assert ([] if value is None else [value]) == unsigned
    assert [_signed(one) for one in unsigned] == signed


def test_without_what_is_optional(make_publisher, make_store, subscribe):
    master, endpoint = make_publisher("--nokv_events_emit_legacy_compat", "--kv_events_emit_object_key=false")
    store, subscriber = make_store(at=master), subscribe(endpoint)
    subscriber.join(store)
    config = ReplicateConfig()
    config.group_ids = ["g"]
    assert store.put_batch(["7"], [b"x"], config) == 0
    subscriber.wait_for(lambda: subscriber.events)
    (event,) = subscriber.events
    assert event.keys().isdisjoint({"type", "block_hashes", "object_key"})
    assert (event["seq_hashes"], event["group_id"]) == ([7], "g")


def test_status_and_metrics(pool):
    master, store, subscriber = pool
    before = status(master)
    assert before["enabled"] is True
    assert store.put_batch(["5", "key"], [b"x", b"y"]) == 0
    subscriber.expect((STORED, "5", "cpu"), (STORED, "key", "cpu"))
    after = status(master)
    assert after["published_events"] - before["published_events"] == 2
    assert after["published_batches"] > before["published_batches"]
    assert after["skipped_unparsed_keys"] - before["skipped_unparsed_keys"] == 1
    assert after["dropped_events"] == 0
    assert master.metric("mooncake_kv_events_published_total") == after["published_events"]
    assert master.metric("mooncake_kv_events_unparsed_keys_total") == after["skipped_unparsed_keys"]


def test_batches_and_numbers(pool):
    _, store, subscriber = pool
    keys = [f"k{i}" for i in range(500)]
    assert store.put_batch(keys, [b"x"] * 500) == 0
    subscriber.wait_for(lambda: len(subscriber.events) == 500)
    assert max(len(batch[1]) for batch in subscriber.batches) <= 64
    assert subscriber.numbers == list(range(subscriber.numbers[0], subscriber.numbers[0] + len(subscriber.numbers)))
    ids = [event["event_id"] for event in subscriber.events]
    assert ids == list(range(ids[0], ids[0] + 500))
    assert {event["object_key"] for event in subscriber.events} == set(keys)


# ---------------------------------------------------------------- how values go


def test_removals_by_name(pool):
    _, store, subscriber = pool
    assert store.put_batch(KEYS, [b"x"] * 3) == 0
    subscriber.expect(*stored(*KEYS))
    assert store.remove("a") == 0
    subscriber.expect(*removed("a"))
    assert store.batch_remove(["b", "c", "none"]) == [0, 0, -704]
    subscriber.expect(*removed("b", "c"))
    assert store.put_batch(KEYS, [b"x"] * 3) == 0
    subscriber.expect(*stored(*KEYS))
    assert store.remove_by_regex("^[ab]$") == 2
    subscriber.expect(*removed("a", "b"))
    assert store.batch_replica_clear(["c"]) == ["c"]
    subscriber.expect(*removed("c"))


def test_remove_all_is_one_event(pool):
    _, store, subscriber = pool
    keys = [f"k{i}" for i in range(1000)]
    assert store.put_batch(keys, [b"x"] * 1000) == 0
    subscriber.wait_for(lambda: len(subscriber.events) == 1000)
    subscriber.forget()
    assert store.remove_all() == 1000
    subscriber.expect(CLEARED)
    assert store.put("again", b"x") == 0
    subscriber.expect((STORED, "again", "cpu"))
    assert store.remove("again") == 0
    subscriber.expect((REMOVED, "again", "cpu"))


def test_what_remove_all_leaves_is_told_again(pool):
    _, store, subscriber = pool
    assert store.put_batch(KEYS, [b"x"] * 3) == 0
    assert store.is_exist("b") == 1  # leased
    subscriber.expect(*stored(*KEYS))
    for _ in range(2):  # the second time nothing goes
        store.remove_all()
        subscriber.wait_for(lambda: len(subscriber.events) == 2)
        assert subscriber.told() == [CLEARED, (STORED, "b", "cpu")]
        subscriber.forget()
    assert store.remove_all(force=True) == 1
    subscriber.expect(CLEARED)


def test_an_upsert_removes_and_stores(pool):
    _, store, subscriber = pool
    assert store.put("k", b"old") == 0
    subscriber.expect(*stored("k"))
    assert store.upsert("k", b"newer") == 0
    subscriber.wait_for(lambda: len(subscriber.events) == 2)
    assert subscriber.told() == [*removed("k"), *stored("k")]


def test_a_put_of_a_key_that_is_there_is_not_told(pool):
    _, store, subscriber = pool
    assert store.put("there", b"x") == 0
    assert store.put("there", b"other") == 0
    assert store.put("more", b"x") == 0
    subscriber.expect(*stored("there", "more"))


def test_eviction(make_publisher, make_store, subscribe):
    master, endpoint = make_publisher("--default_kv_lease_ttl=100")
    store, subscriber = make_store(16 * MIB, at=master), subscribe(endpoint)
    subscriber.join(store)
    for i in range(40):
        wait_until(lambda i=i: store.put(f"k{i}", bytes(MIB)) == 0, what="room")
    subscriber.wait_for(lambda: sum(kind == STORED for kind, *_ in subscriber.told()) == 40)

    def left() -> set[str]:
        there: set[str] = set()
        for kind, key, _ in subscriber.told():
            (there.add if kind == STORED else there.remove)(key)
        return there

    subscriber.wait_for(lambda: left() == set(master.get("/get_all_keys").split()), "the same keys")
    assert 0 < len(left()) <= 16


@pytest.mark.parametrize("how", ["close", "kill"])
def test_a_lost_segment(pool, make_worker, how):
    """The values that lay in it alone."""
    master, _, subscriber = pool
    worker = make_worker(16 * MIB, at=master)
    code = """
config = ReplicateConfig()
config.preferred_segment = store.get_hostname()
result = [store.put(f"w{i}", b"x" * 1000, config) for i in range(50)]
"""
    assert worker(code) == [0] * 50
    keys = [f"w{i}" for i in range(50)]
    subscriber.expect(*stored(*keys))
    if how == "close":
        worker("store.close()")
    else:
        worker.kill()
    subscriber.expect(*removed(*keys))


def test_disk(make_publisher, tmp_path, cleanup, subscribe):
    """To disk, out of memory, and off the disk: each medium is told of by itself."""
    master, endpoint = make_publisher("--enable_offload", f"--quota_bytes={8 * MIB}", "--default_kv_lease_ttl=100")
    store, subscriber = MooncakeDistributedStore(), subscribe(endpoint)
    assert (
        store.setup(
            "127.0.0.1", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "tcp", "", master.address, None, True, str(tmp_path)
        )
        == 0
    )
    cleanup.callback(store.close)
    wait_until(lambda: master.metric("mooncake_disk_tiers") == 1, what="the tier")
    subscriber.join(store)
    assert store.put("k", bytes(MIB)) == 0
    subscriber.wait_for(lambda: (STORED, "k", "disk") in subscriber.told())
    assert [one for one in subscriber.told() if one[1] == "k"] == [(STORED, "k", "cpu"), (STORED, "k", "disk")]
    for i in range(40):
        wait_until(lambda i=i: store.put(f"k{i}", bytes(MIB)) == 0, 20, what="room")
    subscriber.wait_for(lambda: (REMOVED, "k", "disk") in subscriber.told())
    assert (REMOVED, "k", "cpu") in subscriber.told()

    def left() -> set[tuple]:
        there: set[tuple] = set()
        for kind, key, medium in subscriber.told():
            (there.add if kind == STORED else there.remove)((key, medium))
        return there

    def real() -> set[tuple]:
        keys = [key for key in master.get("/get_all_keys").split() if key]
        found = json.loads(master.get("/batch_query_keys?keys=" + ",".join(keys)))["data"]
        memory = {(key, "cpu") for key, one in found.items() if one["values"]}
        return memory | {(key, "disk") for key, one in found.items() if one["local_disk_values"]}

    subscriber.wait_for(lambda: master.metric("mooncake_offload_queue") == 0 and left() == real(), "the same media")
    subscriber.forget()
    assert store.remove_all(force=True) > 0
    subscriber.expect(CLEARED)


# ---------------------------------------------------------------- what goes wrong


def test_overflow_drops_the_oldest_and_leaves_a_gap(make_publisher, make_store, subscribe):
    master, endpoint = make_publisher("--kv_events_queue_capacity=10")
    store, subscriber = make_store(at=master), subscribe(endpoint)
    subscriber.join(store)
    assert store.put("before", b"x") == 0
    subscriber.wait_for(lambda: subscriber.events)
    number, first = subscriber.numbers[-1], subscriber.events[-1]["event_id"]
    subscriber.forget()
    dropped = status(master)["dropped_events"]
    keys = [f"k{i}" for i in range(100)]
    assert store.put_batch(keys, [b"x"] * 100) == 0
    subscriber.wait_for(lambda: subscriber.events and subscriber.events[-1]["event_id"] == first + 100)
    lost = status(master)["dropped_events"] - dropped
    assert len(subscriber.events) == 100 - lost
    assert lost >= 90 - 10
    assert subscriber.numbers[0] == number + 2  # one left out
    assert subscriber.events[-1]["event_id"] == first + 100


@pytest.mark.slow
def test_a_slow_and_a_dead_subscriber_cost_nothing(make_publisher, make_store, make_worker, subscribe):
    master, endpoint = make_publisher()
    store = make_store(at=master)
    silent, heard = subscribe(endpoint), subscribe(endpoint)
    heard.join(store)
    dead = make_worker(at=master)
    dead(f"import zmq; s = zmq.Context().socket(zmq.SUB); s.connect({endpoint!r}); s.subscribe(b'')")
    dead.kill()
    keys = [f"k{i}" for i in range(5000)]
    for at in range(0, len(keys), 1000):
        assert store.put_batch(keys[at : at + 1000], [b"x"] * 1000) == 0
        heard.read()
    heard.wait_for(lambda: len(heard.events) == 5000)
    assert status(master)["dropped_events"] == 0
    assert not silent.batches  # it never read


def test_off_without_both(make_master, make_store, tmp_path):
    log = tmp_path / "log"
    master = make_master("--enable_kv_events", f"--kv_events_bind_endpoint=tcp://127.0.0.1:{free_port()}", log=log)
    assert status(master)["enabled"] is False
    assert make_store(at=master).put("k", b"x") == 0
    assert status(master)["published_events"] == 0
    assert "enable_kv_events has no effect without both" in log.read_text()


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://127.0.0.1", "tcp://192.0.2.1:5557"])
def test_an_address_that_cannot_be_bound(endpoint):
    async def publish() -> None:
        counters = Counters()
        KvPublisher(KvEvents(10, counters), counters, endpoint, "x", legacy=True, with_keys=True)

    with pytest.raises(ConfigError, match="--kv_events_bind_endpoint") as caught:
        asyncio.run(publish())
    assert endpoint in str(caught.value)


def test_a_master_that_cannot_publish_does_not_start():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        flags = ["--enable_kv_events", f"--kv_events_bind_endpoint={endpoint}", "--kv_events_backend_id=x"]
        ports = [f"--rpc_port={free_port()}", f"--metrics_port={free_port()}"]
        run = subprocess.run([BIN / "mooncake_master", *flags, *ports], capture_output=True, text=True, timeout=20)
    assert run.returncode == 1
    assert endpoint in run.stderr
    assert "Traceback" not in run.stderr
