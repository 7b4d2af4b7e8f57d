"""What a restarted master knows of the values that the segments hold."""

import os
import signal
import time

import pytest

from mooncake.store import ReplicateConfig, SoftPinAction
from tests.faults.test_kills import pattern, used
from tests.processes import children, stop, wait_until

MIB = 1 << 20


def restart(master) -> None:
    master.kill()
    master.start()


def config(**fields) -> ReplicateConfig:
    made = ReplicateConfig()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    "pin",
    [
        {"with_hard_pin": True},
        {"soft_pin_action": SoftPinAction.ENABLE},
        {"soft_pin_action": SoftPinAction.ENABLE, "soft_pin_ttl_ms": 60_000},
    ],
    ids=["hard", "soft", "soft with ttl"],
)
def test_pins_outlive_the_master(make_master, make_store, pin):
    master = make_master("--default_kv_lease_ttl=100", "--noallow_evict_soft_pinned_objects")
    store = make_store(4 * MIB, at=master)
    assert store.put("pinned", b"p" * MIB, config(**pin)) == 0
    assert store.put("plain", b"q" * MIB) == 0
    restart(master)
    wait_until(lambda: store.is_exist("pinned") == 1, 5)
    time.sleep(0.2)
    for i in range(9):
        assert store.put(f"k{i}", b"v" * MIB) == 0
    assert store.get("pinned") == b"p" * MIB
    assert store.get("plain") == b""


def test_a_soft_pin_ends_in_time_through_a_restart(make_master, make_store):
    """The time it had before counts."""
    master = make_master("--default_kv_lease_ttl=100", "--noallow_evict_soft_pinned_objects")
    store = make_store(4 * MIB, at=master)
    started = time.monotonic()
    options = config(soft_pin_action=SoftPinAction.ENABLE, soft_pin_ttl_ms=1500)
    assert store.put("pinned", b"p" * MIB, options) == 0
    restart(master)
    wait_until(lambda: store.is_exist("pinned") == 1, 5)
    time.sleep(max(0.0, started + 1.7 - time.monotonic()))
    for i in range(9):
        assert store.put(f"k{i}", b"v" * MIB) == 0
    assert store.is_exist("pinned") == 0


def test_every_shape_of_value_outlives_the_master(make_master, make_store, make_worker):
    """Small and large, in several extents, spanning segments, with two replicas, in groups, many; in a pool of which
    one segment, perhaps the first to come back, is full."""
    master = make_master("--default_kv_lease_ttl=500")
    store = make_store(32 * MIB, buffer=64 * MIB, at=master)
    make_worker(32 * MIB, at=master)
    sizes = {f"k{i}": 1 + i * 997 % 5000 for i in range(2000)}
    for i in range(60):
        sizes[f"hole{i}"] = 300_000 + 517 * i
    for key, size in sizes.items():
        assert store.put(key, pattern(len(key) + size, size)) == 0
    for i in range(0, 60, 2):  # so that a large value needs several extents
        assert store.remove(f"hole{i}", force=True) == 0
        del sizes[f"hole{i}"]
    sizes["two"] = 1_000_000
    assert store.put("two", pattern(3 + 1_000_000, 1_000_000), config(replica_num=2)) == 0
    grouped = [f"g{i}" for i in range(20)]
    sizes |= dict.fromkeys(grouped, 5000)
    values = [pattern(len(key) + 5000, 5000) for key in grouped]
    assert store.put_batch(grouped, values, config(group_ids=["g"] * 20)) == 0
    sizes["span"] = 33 * MIB
    assert store.put("span", pattern(4 + 33 * MIB, 33 * MIB)) == 0
    taken = used(master)
    restart(master)
    wait_until(lambda: store.is_exist("span") == 1, 5)
    assert store.put("small", b"s") == 0
    assert store.remove("small") == 0
    wait_until(lambda: used(master) == taken, 3)
    assert len(store.get_replica_desc("two")) == 2
    keys = list(sizes)
    for key, value in zip(keys, store.get_batch(keys), strict=True):
        assert value == pattern(len(key) + sizes[key], sizes[key]), key
    assert store.remove_all(force=True) == len(sizes)
    wait_until(lambda: used(master) == 0, 12)


@pytest.mark.parametrize("how", ["removed", "needed"])
def test_parts_of_a_lost_value_do_not_stay(make_master, make_store, make_worker, how):
    """A value that spans two segments, one of which is gone together with the master: its other half goes when
    everything is removed or a put needs the room."""
    master = make_master("--default_kv_lease_ttl=100")
    store = make_store(8 * MIB, at=master)
    other = make_worker(8 * MIB, at=master)
    first = config(preferred_segments=[other("result = store.get_hostname()")])
    assert store.put("span", b"s" * (12 * MIB), first) == 0
    (server,) = children(other.pid)
    os.kill(server, signal.SIGKILL)
    restart(master)
    wait_until(lambda: store.put("probe", b"v") == 0, 5)
    assert store.get("span") == b""
    assert used(master) >= 4 * MIB
    if how == "removed":
        assert store.remove_all(force=True) == 1
        wait_until(lambda: used(master) == 0, 12)
    else:
        wait_until(lambda: store.put("large", b"l" * (7 * MIB)) == 0, 12)
        assert store.get("large") == b"l" * (7 * MIB)


def test_a_group_evicted_while_half_of_it_was_away_does_not_come_back_in_half(make_master, make_store, make_worker):
    """Its other members lie in a segment that returns after the group was evicted."""
    master = make_master("--default_kv_lease_ttl=100")
    store = make_store(4 * MIB, at=master)
    other = make_worker(4 * MIB, at=master)
    (server,) = children(other.pid)
    names = {store.get_hostname(): "a", other("result = store.get_hostname()"): "b"}
    for name, tag in names.items():
        keys = [f"{tag}{i}" for i in range(4)]
        options = config(group_ids=["g"] * 4, preferred_segments=[name])
        assert store.put_batch(keys, [b"g" * 100_000] * 4, options) == 0
    assert other("result = store.put('lone', b'l' * 1000)") == 0
    stop(server)
    restart(master)
    try:
        wait_until(lambda: store.is_exist("a0") == 1, 5)
        time.sleep(0.2)
        for i in range(8):
            assert store.put(f"k{i}", b"v" * MIB) == 0
        assert store.batch_is_exist([f"a{i}" for i in range(4)]) == [0] * 4
    finally:
        os.kill(server, signal.SIGCONT)
    wait_until(lambda: len(master.get("/get_all_segments").split()) == 2, 8)
    time.sleep(0.2)
    assert store.batch_is_exist([f"{tag}{i}" for tag in "ab" for i in range(4)]) == [0] * 8
