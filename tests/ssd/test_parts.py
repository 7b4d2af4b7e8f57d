"""Values that no single segment had room for: they go to one disk as a whole, and are as others from then on."""

import os
import random
import signal
import threading
import time

import pytest

from tests.processes import children, wait_until
from tests.ssd.conftest import MIB, pattern, put_all, settled
from tests.ssd.test_together import all_there, is_empty, kinds
from tests.store.test_drains import drain, end_of

SIZE = 24 * MIB + 4321  # in two segments of 16 MiB


def parts_of(store, key: str) -> int:
    (replica,) = [d for d in store.get_replica_desc(key) if d.is_memory_replica()]
    return len({b.transport_endpoint_ for b in replica.get_memory_descriptor().buffer_descriptors})


@pytest.mark.parametrize("flags", [[], ["--offload_on_evict"]], ids=["eager", "on eviction"])
def test_values_in_parts_go_to_disk_and_come_back(make_master, make_disk_store, make_disk_worker, flags):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=200", *flags)
    store, worker = make_disk_store(master, segment=16 * MIB), make_disk_worker(master, segment=16 * MIB)
    values = {f"k{i}": pattern(f"k{i}", SIZE + i) for i in range(5)}
    put_all(store, values)
    wait_until(lambda: settled(master))
    more = {f"more{i}": pattern(f"more{i}", MIB) for i in range(40)}
    put_all(store, more)
    wait_until(lambda: settled(master))
    assert [kinds(store, key) for key in values] == [["disk"]] * 5
    all_there(store, values)
    read = "from tests.ssd.conftest import pattern\nresult = store.get('k1') == pattern('k1', size)"
    wait_until(lambda: worker(read, size=SIZE + 1), 20, "the value at the other server")
    assert master.metric("master_evicted_key_count") == 0
    assert master.metric("mooncake_offload_failed_total") == 0
    master.kill()
    master.start()
    wait_until(lambda: master.metric("mooncake_disk_tiers") == 2, 20, "both tiers")
    all_there(store, values)
    is_empty(master, store)


def test_only_one_of_the_servers_has_a_disk(make_master, make_disk_store, make_store):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=200")
    store, other = make_disk_store(master, segment=16 * MIB), make_store(segment=16 * MIB, at=master)
    values = {f"k{i}": pattern(f"k{i}", SIZE) for i in range(3)}
    put_all(other, values)
    wait_until(lambda: settled(master))
    all_there(other, values)
    assert master.metric("file_cache_nums_") == 3
    other.close()
    wait_until(lambda: [kinds(store, key) for key in values] == [["disk"]] * 3, 15, "the other server's end")
    all_there(store, values)


def test_they_are_announced_again_and_promoted(make_master, make_disk_worker):
    master = make_master("--enable_offload", "--promotion_on_hit")
    workers = [make_disk_worker(master, segment=16 * MIB) for _ in range(2)]
    fill = "from tests.ssd.conftest import pattern\nresult = store.put('k', pattern('k', size))"
    assert workers[0](fill, size=SIZE) == 0
    wait_until(lambda: settled(master) and master.metric("file_cache_nums_") == 1)
    for worker in workers:
        worker("result = store.close()")
    wait_until(lambda: master.metric("master_key_count") == 0, 15, "the end of both servers")
    workers = [make_disk_worker(master, segment=64 * MIB) for _ in range(2)]
    read = "from tests.ssd.conftest import pattern\nresult = store.get('k') == pattern('k', size)"
    for worker in workers * 3:
        assert worker(read, size=SIZE)
    wait_until(lambda: master.metric("master_promotion_completed_total") == 1, 15, "the promotion")
    assert workers[1](read, size=SIZE)
    assert master.metric("mooncake_disk_corrupt") == 0


def test_a_node_whose_values_in_parts_fit_nowhere_is_drained_to_disk(make_master, make_disk_store, make_disk_worker):
    master = make_master("--enable_offload", "--offload_on_evict", "--default_kv_lease_ttl=200")
    store, _ = make_disk_store(master, segment=16 * MIB), make_disk_worker(master, segment=16 * MIB)
    value = pattern("k", SIZE)
    put_all(store, {"k": value})
    assert kinds(store, "k") == ["memory"]
    done = end_of(master, drain(master, store.get_hostname()))
    assert done["status_name"] == "SUCCEEDED"
    assert kinds(store, "k") == ["disk"]
    all_there(store, {"k": value})


def test_a_value_that_goes_while_it_is_gathered(make_master, make_disk_store, make_disk_worker):
    """Its room is given to others at once: what lands on disk is a value's own bytes, or nothing."""
    master = make_master("--enable_offload", "--default_kv_lease_ttl=50")
    store, worker = make_disk_store(master, segment=16 * MIB), make_disk_worker(master, segment=16 * MIB)
    rng = random.Random(5)
    end = time.monotonic() + 5
    stop = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not stop.is_set():
            for key in ("a", "b"):
                value = store.get(key)
                if value and value != value[:1] * len(value):
                    wrong.append(key)

    reader = threading.Thread(target=read)
    reader.start()
    turn = 0
    while time.monotonic() < end:
        turn += 1
        key = rng.choice(["a", "b"])
        store.remove(key, force=True)
        store.put(key, bytes([turn % 251]) * (SIZE + turn))
        time.sleep(rng.random() * 0.03)
    stop.set()
    reader.join(30)
    assert wrong == []
    wait_until(lambda: settled(master), 20)
    assert master.metric("mooncake_disk_corrupt") == 0
    is_empty(master, store)
    assert worker("result = store.health_check()") == 0


def test_its_other_server_stops_answering(make_master, make_disk_store, make_worker):
    """The write fails, in time, and is counted; the value stays in memory."""
    master = make_master("--enable_offload", "--default_kv_lease_ttl=100")
    store, other = make_disk_store(master, segment=16 * MIB), make_worker(at=master, segment=16 * MIB)
    assert store.put("first", pattern("first", SIZE)) == 0  # so that both segments are known, and mapped
    wait_until(lambda: store.remove("first", force=True) == 0)
    wait_until(lambda: settled(master) and master.metric("master_allocated_bytes") == 0)
    (server,) = children(other.pid)
    os.kill(server, signal.SIGSTOP)
    try:
        value = pattern("k", SIZE)
        assert store.put("k", value) == 0
        wait_until(lambda: master.metric("mooncake_offload_failed_total") == 1, 30, "the end of the write")
    finally:
        os.kill(server, signal.SIGCONT)
    all_there(store, {"k": value})
