"""Segments that come and go while the store is in use."""

import pytest

from mooncake.store import MooncakeDistributedStore
from tests.processes import children, wait_until

MIB = 1 << 20


def test_memory_that_comes_and_goes(master, make_store):
    store = make_store(segment=0)
    assert store.put("k", b"v") == -200
    first = store.allocate_and_mount_segment(10 * MIB)
    assert first == {"ret": 0, "segment_ids": first["segment_ids"], "allocated_size": 16 * MIB}
    (number,) = first["segment_ids"]
    assert all(part.isdigit() for part in number.split("-"))
    second = store.allocate_and_mount_segment(16 * MIB, "tcp", "cpu:0")
    assert master.metric("master_total_capacity_bytes") == 32 * MIB
    assert store.put("k", b"v" * (20 * MIB)) == 0
    assert store.get("k") == b"v" * (20 * MIB)
    assert store.unmount_and_free_segment(second["segment_ids"], 1) == 0
    wait_until(lambda: store.get("k") == b"", what="the end of what was there")
    assert store.unmount_and_free_segment(second["segment_ids"]) == -1
    assert store.unmount_and_free_segment(["1-2"]) == store.unmount_and_free_segment(["no id"]) == -1
    assert store.unmount_and_free_segment([]) == 0
    assert store.put("small", b"v") == 0
    assert store.get("small") == b"v"


def test_what_is_refused(make_store):
    store = make_store(segment=16 * MIB)
    nothing = {"ret": -1, "segment_ids": [], "allocated_size": 0}
    assert store.allocate_and_mount_segment(0) == store.allocate_and_mount_segment(1 << 45) == nothing
    for call in (store.allocate_and_mount_segment, lambda n: store.unmount_and_free_segment([], n)):
        with pytest.raises(TypeError):
            call(-1)
    fresh = MooncakeDistributedStore()
    assert fresh.allocate_and_mount_segment(16 * MIB) == nothing
    assert fresh.unmount_and_free_segment(["1-2"]) == -1


def test_they_end_with_the_store_and_with_its_process(master, make_worker):
    worker = make_worker(segment=16 * MIB)
    worker("result = store.allocate_and_mount_segment(16 << 20)['ret']")
    servers = children(worker.pid)
    assert len(servers) == 2
    worker("result = store.close()")
    assert master.metric("master_total_capacity_bytes") == 0
    wait_until(lambda: not children(worker.pid), what="the end of the servers")
    other = make_worker(segment=16 * MIB)
    other("result = store.allocate_and_mount_segment(16 << 20)['ret']")
    other.kill()
    wait_until(lambda: master.metric("master_total_capacity_bytes") == 0, limit=15, what="the end of the segments")
