"""Calls that replace, copy, move, clear or cut values, on values that are on disk, or just being written there."""

import time

import numpy as np
import pytest

from mooncake.client.prefixes import PrefixClient
from mooncake.rpc.messages import Need
from mooncake.store import ReplicateConfig, TaskStatus
from mooncake.transfer.blocks import BlockShape, BlockVector
from tests.processes import wait_until
from tests.ssd.conftest import MIB, pattern, put_all, settled

ENDED = (TaskStatus.SUCCESS, TaskStatus.FAILED)


def config(**settings) -> ReplicateConfig:
    made = ReplicateConfig()
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def kinds(store, key: str) -> list[str]:
    return sorted("memory" if d.is_memory_replica() else "disk" for d in store.get_replica_desc(key))


def finish(store, created):
    task, code = created
    assert code == 0
    wait_until(lambda: store.query_task(task)[0].status in ENDED, limit=20, what="the end of the task")
    return store.query_task(task)[0]


def on_disk_only(store, keys) -> list[str]:
    return [key for key in keys if kinds(store, key) == ["disk"]]


def put_in(store, key: str, value: bytes) -> None:
    wait_until(
        lambda: store.put(key, value, config(preferred_segment=store.get_hostname())) == 0, 20, f"a put of {key}"
    )


@pytest.fixture(params=["eager", "on eviction"])
def filled(request, make_master, make_disk_store):
    """(master, store, values): twice the memory, in values of 1 MiB."""
    flags = ["--offload_on_evict"] if request.param == "on eviction" else []
    master = make_master("--enable_offload", "--default_kv_lease_ttl=1000", *flags)
    store = make_disk_store(master)
    values = {f"k{i}": pattern(f"k{i}", MIB) for i in range(64)}
    put_all(store, values)
    wait_until(lambda: settled(master))
    return master, store, values


def all_there(store, values: dict[str, bytes]) -> None:
    """Within the lease that a try has, on a machine that may be busy; never other bytes."""

    def read() -> bool:
        got = store.get_batch(list(values))
        assert all(found in (b"", value) for found, value in zip(got, values.values(), strict=True))
        return all(got)

    wait_until(read, 20, "all values")


def is_empty(master, store) -> None:
    """Everything can be removed, and nothing is left of it."""
    wait_until(lambda: store.remove_all(force=True) == 0, what="the removal of everything")
    wait_until(lambda: master.metric("master_allocated_bytes") == 0, 15, "the return of all memory")
    wait_until(lambda: master.metric("file_cache_nums_") == 0 and settled(master), 15, "an empty disk")


def test_upserts_replace_what_is_on_disk(filled):
    master, store, values = filled
    same, shorter, *_ = on_disk_only(store, values)
    values[same], values[shorter] = pattern("same", MIB), b"shorter"
    for key in (same, shorter):
        wait_until(lambda k=key: store.upsert(k, values[k]) == 0, 20, "the upsert")
        assert store.get(key) == values[key]
    all_there(store, values)
    put_all(store, {f"more{i}": pattern(f"more{i}", MIB) for i in range(40)})
    wait_until(lambda: settled(master))
    assert store.get(same) == values[same]
    assert store.get(shorter) == b"shorter"
    master.kill()
    master.start()
    wait_until(lambda: store.get(same) == values[same], 15, "the new value after a restart")
    wait_until(lambda: store.get(shorter) == b"shorter", 15, "the new value after a restart")
    is_empty(master, store)


def test_upserts_while_the_old_value_is_written(make_master, make_disk_store):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=1000")
    store = make_disk_store(master)
    keys = [f"k{i}" for i in range(8)]
    for turn in range(10):
        for key in keys:
            value = pattern(f"{key}/{turn}", MIB - turn)
            wait_until(lambda k=key, v=value: store.upsert(k, v) == 0, 20, "the upsert")
        assert store.get_batch(keys) == [pattern(f"{key}/{turn}", MIB - turn) for key in keys]
    wait_until(lambda: settled(master))
    assert master.metric("file_cache_nums_") == len(keys)
    is_empty(master, store)


def test_an_upsert_that_finds_no_room_keeps_what_is_on_disk(make_master, make_disk_store):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=200")
    store = make_disk_store(master, segment=16 * MIB)
    values = {f"k{i}": pattern(f"k{i}", MIB) for i in range(32)}
    put_all(store, values)
    wait_until(lambda: settled(master))
    key = on_disk_only(store, values)[0]
    pinned = 0
    while pinned < 20 and store.put(f"pinned{pinned}", b"p" * MIB, config(with_hard_pin=True)) == 0:
        pinned += 1
    wait_until(lambda: store.upsert(key, b"n" * (8 * MIB)) == -200, 20, "a refusal")
    assert store.get(key) == values[key]


def test_sessions(filled):
    """A get session reads ranges from disk; a put session sees that the key is taken, and its value goes to disk."""
    master, store, values = filled
    key, other, *_ = on_disk_only(store, values)
    room = np.zeros(MIB, np.uint8)
    base = room.ctypes.data
    assert store.batch_put_session_start([key], [MIB]) == [-705]
    wait_until(lambda: store.batch_put_session_start(["session"], [MIB]) == [0], 20, "room for the session")
    assert store.batch_get_session_start([key, other, "none"]) == [0, 0, -704]
    read = store.batch_get_into_multi_buffer_ranges
    assert read([key, other], [[base, base + 100], [base + 4096]], [[100, 50], [5000]], [[0, MIB - 50], [4095]]) == [
        150,
        5000,
    ]
    assert room[:150].tobytes() == values[key][:100] + values[key][-50:]
    assert room[4096:9096].tobytes() == values[other][4095:9095]
    assert store.batch_get_session_end([key, other]) == 0
    room[:] = np.frombuffer(pattern("session", MIB), np.uint8)
    assert store.batch_put_from_multi_buffer_ranges(["session"], [[base]], [[MIB]], [[0]]) == [MIB]
    assert store.batch_put_session_end(["session"]) == [0]
    put_all(store, {f"more{i}": pattern(f"more{i}", MIB) for i in range(64)})
    wait_until(lambda: settled(master))
    assert store.get("session") == pattern("session", MIB)


def test_tasks_want_a_value_in_memory(filled, make_store):
    master, store, values = filled
    other = make_store(segment=32 * MIB, at=master)
    key = on_disk_only(store, values)[0]
    assert store.create_copy_task(key, [other.get_hostname()]) == ((0, 0), -710)
    assert store.create_move_task(key, store.get_hostname(), other.get_hostname()) == ((0, 0), -600)
    assert store.get(key) == values[key]


def test_values_are_moved_while_they_are_written(make_master, make_disk_store, make_disk_worker):
    """And are written where they are now when they leave memory; a new master knows them again."""
    master = make_master("--enable_offload", "--default_kv_lease_ttl=2000")
    store, worker = make_disk_store(master), make_disk_worker(master)
    name, other = store.get_hostname(), worker("result = store.get_hostname()")
    values = {f"k{i}": pattern(f"k{i}", MIB + i) for i in range(20)}
    created = {}
    for i, (key, value) in enumerate(values.items()):
        put_in(store, key, value)
        move = store.create_move_task(key, name, other) if i % 2 else store.create_copy_task(key, [other])
        created[key] = move
    assert [finish(store, task).status for task in created.values()] == [TaskStatus.SUCCESS] * len(values)
    all_there(store, values)
    time.sleep(2.5)  # till the leases are over
    more = {f"more{i}": pattern(f"more{i}", MIB) for i in range(128)}  # twice the memory
    put_all(store, more)
    wait_until(lambda: settled(master))
    assert on_disk_only(store, values)
    values |= more
    all_there(store, values)
    assert master.metric("master_evicted_key_count") == 0
    master.kill()
    master.start()
    wait_until(lambda: master.metric("master_key_count") == len(values), 20, "all values")
    wait_until(lambda: master.metric("mooncake_disk_tiers") == 2, 20, "both tiers")
    all_there(store, values)
    is_empty(master, store)


def test_a_moved_value_goes_to_the_disk_of_its_server(make_master, make_disk_store, make_disk_worker):
    master = make_master("--enable_offload", "--offload_on_evict", "--default_kv_lease_ttl=100")
    store, worker = make_disk_store(master, segment=16 * MIB), make_disk_worker(master, segment=16 * MIB)
    value = pattern("k", MIB)
    put_in(store, "k", value)
    moved = store.create_move_task("k", store.get_hostname(), worker("result = store.get_hostname()"))
    assert finish(store, moved).status == TaskStatus.SUCCESS
    put_all(store, {f"more{i}": pattern(f"more{i}", MIB) for i in range(60)})
    wait_until(lambda: settled(master))
    assert kinds(store, "k") == ["disk"]
    assert store.get("k") == value
    worker("result = store.close()")
    wait_until(lambda: store.is_exist("k") == 0, 15, "the end of its server's values")


def test_clearing_of_replicas(filled):
    _, store, values = filled
    name = store.get_hostname()
    gone, stays, *_ = on_disk_only(store, values)
    time.sleep(1.5)  # till the leases are over
    assert store.batch_replica_clear([gone, stays], name) == []
    assert store.batch_replica_clear([gone], "") == [gone]
    assert store.is_exist(gone) == 0
    assert store.get(stays) == values[stays]


def test_clearing_a_segment_leaves_what_is_on_disk(make_master, make_disk_store):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=100")
    store = make_disk_store(master)
    assert store.put("k", pattern("k", MIB)) == 0
    wait_until(lambda: kinds(store, "k") == ["disk", "memory"], what="both replicas")
    name = store.get_hostname()
    wait_until(lambda: store.batch_replica_clear(["k"], name) == ["k"], what="the clearing")
    assert kinds(store, "k") == ["disk"]
    assert store.get("k") == pattern("k", MIB)
    assert master.metric("master_evicted_key_count") == 0
    wait_until(lambda: store.batch_replica_clear(["k"]) == ["k"], what="the clearing")
    assert store.is_exist("k") == 0
    is_empty(master, store)


def test_clearing_while_values_are_written(make_master, make_disk_store, make_store):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=1000")
    store = make_disk_store(master)
    other = make_store(segment=32 * MIB, at=master)
    name = store.get_hostname()
    keys = [f"k{i}" for i in range(20)]
    for key in keys:
        assert store.put(key, pattern(key, MIB), config(replica_num=2)) == 0
        store.batch_replica_clear([key], name)
    assert store.get_batch(keys) == [pattern(key, MIB) for key in keys]
    wait_until(lambda: settled(master))
    assert other.get_batch(keys) == [pattern(key, MIB) for key in keys]
    is_empty(master, store)


def test_further_segments_have_tiers_too(make_master, make_disk_store):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=1000")
    store = make_disk_store(master, segment=16 * MIB)
    further = store.allocate_and_mount_segment(16 * MIB)
    assert further["ret"] == 0
    wait_until(lambda: master.metric("mooncake_disk_tiers") == 2, what="the second tier")
    values = {f"k{i}": pattern(f"k{i}", MIB) for i in range(96)}
    put_all(store, values)
    wait_until(lambda: settled(master))
    all_there(store, values)
    assert master.metric("master_evicted_key_count") == 0
    assert store.unmount_and_free_segment(further["segment_ids"]) == 0
    wait_until(lambda: master.metric("mooncake_disk_tiers") == 1, what="the end of the second tier")
    got = store.get_batch(list(values))
    assert any(got)
    assert all(value in (b"", values[key]) for key, value in zip(values, got, strict=True))


def test_blocks_of_an_engine(filled):
    """Read from disk and memory in one call, into pieces; a miss and a wrong size are told from the rest."""
    _, store, values = filled
    keys = on_disk_only(store, values)[:5] + [key for key in values if "memory" in kinds(store, key)][:3]
    layers, blocks = 4, len(keys) + 1
    piece = MIB // layers
    room = np.zeros(layers * blocks * piece, np.uint8)
    assert store.register_buffer(room.ctypes.data, room.nbytes) == 0
    bases = [room.ctypes.data + layer * blocks * piece for layer in range(layers)]
    vector = BlockVector(BlockShape(bases, [piece] * layers, [piece] * layers), list(range(blocks))[::-1])
    assert store.get_into_blocks([*keys, "none"], vector) == [0] * len(keys) + [-704]
    shaped = room.reshape(layers, blocks, piece)
    for i, key in enumerate(keys):
        assert shaped[:, blocks - 1 - i].tobytes() == values[key], key
    halves = BlockVector(BlockShape(bases, [piece] * layers, [piece // 2] * layers), [0])
    assert store.get_into_blocks(keys[:1], halves) == [-800]
    assert store.unregister_buffer(room.ctypes.data) == 0


def test_prefixes_of_several_groups_count_what_is_on_disk(make_master, make_disk_store):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=100")
    store = make_disk_store(master, segment=16 * MIB)
    tails = [str(i) for i in range(32)]
    values = {f"{head}{tail}": pattern(head + tail, MIB) for tail in tails for head in ("full/", "window/")}
    put_all(store, values)
    wait_until(lambda: settled(master))
    assert on_disk_only(store, values)
    client = PrefixClient(master.address, 5.0)
    try:
        needs = [Need(["full/"]), Need(["window/"], last=2)]
        assert client.places(needs, [tails], 1) == [32]
        assert store.remove("window/30", force=True) == store.remove("full/20", force=True) == 0
        assert client.places(needs, [tails], 1) == [20]
        assert client.lengths(["full/", "window/"], [tails]) == [20]
    finally:
        client.close()


def test_values_on_disk_of_before_there_were_tenants(make_master, make_disk_store, disk, tmp_path):
    """They are the default tenant's, who may read and remove them; and files of them are evicted as others."""
    policy = tmp_path / "quotas.yaml"
    policy.write_text("version: 1\ntenants:\n- {name: default, quota: 64MB}\n")
    master = make_master("--enable_offload", "--default_kv_lease_ttl=100")
    store = make_disk_store(master, segment=16 * MIB)
    values = {f"k{i}": pattern(f"k{i}", MIB) for i in range(40)}
    put_all(store, values)
    wait_until(lambda: settled(master))
    master.kill()
    master._flags = (
        *master._flags, "--enable_multi_tenants", f"--tenant_quota_connector_uri={policy}",
        f"--quota_bytes={64 * MIB}",
    )  # fmt: skip
    master.start()
    wait_until(lambda: master.metric("mooncake_disk_tiers") == 1, 15, "the tier")
    all_there(store, values)
    assert store.remove("k3", force=True) == 0
    assert store.get("k3") == b""
    more = {f"more{i}": pattern(f"more{i}", MIB) for i in range(60)}
    put_all(store, more)
    wait_until(lambda: settled(master))
    wait_until(lambda: master.metric("mooncake_disk_evicted_total") > 0, 15, "evictions from disk")
    gone = [key for key in values if key != "k3" and not store.is_exist(key)]
    assert "k0" in gone
    assert all(store.get(key) in (b"", values[key]) for key in values)
    is_empty(master, store)
