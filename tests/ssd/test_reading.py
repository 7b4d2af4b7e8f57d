"""Values that are on disk only read as any others."""

import ctypes
import threading

import pytest

from mooncake.store import ReplicateConfig
from tests.processes import wait_until
from tests.ssd.conftest import MIB, pattern, put_all, settled

SIZES = [1, 100, 4095, 4096, 4097, 65_536, 100_000, MIB, 3 * MIB + 17]


def many(total: int) -> dict[str, bytes]:
    """Values of all sizes, `total` bytes together at least."""
    values: dict[str, bytes] = {}
    at = length = 0
    while length < total:
        size = SIZES[at % len(SIZES)]
        values[f"k{at}"] = pattern(f"k{at}", size)
        length += size
        at += 1
    return values


@pytest.fixture(params=["eager", "on eviction"])
def filled(request, make_master, make_disk_store):
    """(master, store, values): three times the memory."""
    flags = ["--offload_on_evict"] if request.param == "on eviction" else []
    master = make_master("--enable_offload", "--default_kv_lease_ttl=1000", *flags)
    store = make_disk_store(master)
    values = many(96 * MIB)
    put_all(store, values)
    wait_until(lambda: settled(master))
    return master, store, values


def test_three_times_the_memory_comes_back(filled):
    """By every way of reading, and counted."""
    master, store, values = filled
    keys = list(values)
    assert master.metric("mem_cache_nums_") < len(keys)
    assert store.batch_is_exist(keys) == [1] * len(keys)
    assert store.longest_prefix(keys) == len(keys)
    assert [store.get(key) == value for key, value in values.items()] == [True] * len(keys)
    assert store.get_batch(keys) == list(values.values())
    assert [bytes(handle) for handle in store.batch_get_buffer(keys)] == list(values.values())
    assert [store.get_size(key) for key in keys] == [len(value) for value in values.values()]
    assert master.metric("file_cache_hit_nums_") > 0
    assert master.metric("master_evicted_key_count") == 0
    wait_until(lambda: master.metric("mooncake_disk_reads") > 0)


def test_reading_into_given_memory(filled):
    _, store, values = filled
    keys = list(values)[:60]
    room = ctypes.create_string_buffer(sum(len(values[key]) for key in keys) + 64)
    base = ctypes.addressof(room)
    assert store.register_buffer(base, len(room)) == 0
    at, pointers, sizes = base, [], []
    for key in keys:
        pointers.append(at)
        sizes.append(len(values[key]))
        at += sizes[-1]
    assert store.batch_get_into(keys, pointers, sizes) == sizes
    assert room.raw[: at - base] == b"".join(values[key] for key in keys)
    ctypes.memset(base, 0, len(room))
    halves = [[p, p + n // 2] if n > 1 else [p] for p, n in zip(pointers, sizes, strict=True)]
    lengths = [[n // 2, n - n // 2] if n > 1 else [n] for n in sizes]
    assert store.batch_get_into_multi_buffers(keys, halves, lengths) == sizes
    assert room.raw[: at - base] == b"".join(values[key] for key in keys)
    ctypes.memset(base, 0, len(room))
    key = next(key for key in keys if len(values[key]) == 100_000)
    got = store.get_into_ranges([base], [[key]], [[[0, 1000]]], [[[5, 90_000]]], [[[10, 10_000]]])
    assert got == [[[10, 10_000]]]
    assert room.raw[:10] == values[key][5:15]
    assert room.raw[1000:11_000] == values[key][90_000:]


@pytest.mark.parametrize("force_tcp", [False, True])
def test_other_processes_read_from_the_owner(filled, make_worker, force_tcp):
    master, _, values = filled
    env = {"MC_FORCE_TCP": "1"} if force_tcp else {}
    worker = make_worker(at=master, env=env)
    keys = list(values)
    worker("import zlib; got = [zlib.crc32(value) for value in store.get_batch(keys)]; result = 0", keys=keys)
    import zlib

    assert worker("result = got") == [zlib.crc32(value) for value in values.values()]
    moved = worker("result = store.transfer_stats()")
    assert moved["tcp" if force_tcp else "shm"] >= sum(map(len, values.values()))


def test_what_a_value_on_disk_looks_like(filled):
    master, store, values = filled
    descriptors = {key: store.get_replica_desc(key) for key in values}
    on_disk = [key for key, found in descriptors.items() if not any(d.is_memory_replica() for d in found)]
    assert on_disk
    (descriptor,) = descriptors[on_disk[0]]
    assert descriptor.is_local_disk_replica()
    assert not descriptor.is_disk_replica()
    with pytest.raises(RuntimeError, match="disk"):
        descriptor.get_memory_descriptor()
    import json

    shown = json.loads(master.get(f"/batch_query_keys?keys={on_disk[0]}"))["data"][on_disk[0]]
    assert shown["local_disk_values"][0]["object_size_"] == len(values[on_disk[0]])


def test_removed_values_are_gone(filled):
    master, store, values = filled
    keys = list(values)
    assert store.remove(keys[0], force=True) == 0
    assert store.get(keys[0]) == b""
    assert store.put(keys[0], b"another") == 0
    assert store.get(keys[0]) == b"another"
    assert store.remove_all(force=True) == len(keys)
    assert store.get_batch(keys) == [b""] * len(keys)
    wait_until(lambda: master.metric("master_allocated_bytes") == 0)
    assert master.metric("file_cache_nums_") == 0
    assert master.metric("master_key_count") == 0


def test_many_readers_share_little_staging(make_master, make_disk_store, monkeypatch):
    """Eight threads that each ask for more than fits the staging memory."""
    monkeypatch.setenv("MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES", str(16 * MIB))
    master = make_master("--enable_offload")
    store = make_disk_store(master, segment=16 * MIB)
    values = {f"k{i}": pattern(f"k{i}", MIB + i) for i in range(48)}
    put_all(store, values)
    wrong: list[str] = []

    def read() -> None:
        for key, value in zip(values, store.get_batch(list(values)), strict=True):
            if value != values[key]:
                wrong.append(key)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_often_read_values_come_back_to_memory(make_master, make_disk_store):
    master = make_master("--enable_offload", "--promotion_on_hit", "--default_kv_lease_ttl=100")
    store = make_disk_store(master)
    values = {f"k{i}": pattern(f"k{i}", MIB + 5) for i in range(40)}
    put_all(store, values)
    wait_until(lambda: settled(master))
    hot = next(key for key in values if not store.get_replica_desc(key)[0].is_memory_replica())
    spare = [key for key in values if key != hot and store.get_replica_desc(key)[0].is_memory_replica()][:8]
    for key in spare:
        assert store.remove(key, force=True) == 0
    assert store.get(hot) == values[hot]
    assert master.metric("master_promotion_admitted_total") == 0
    assert store.get(hot) == values[hot]
    wait_until(lambda: store.get_replica_desc(hot)[0].is_memory_replica())
    assert master.metric("master_promotion_completed_total") == 1
    before = master.metric("file_cache_hit_nums_")
    assert store.get(hot) == values[hot]
    assert master.metric("file_cache_hit_nums_") == before
    assert [d.is_local_disk_replica() for d in store.get_replica_desc(hot)] == [False, True]
    master.kill()
    master.start()
    wait_until(lambda: store.is_exist(hot) == 1)
    wait_until(lambda: len(store.get_replica_desc(hot)) == 2)
    assert store.get(hot) == values[hot]


def test_groups_leave_and_stay_together(make_master, make_disk_store):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=100", "--offload_on_evict")
    store = make_disk_store(master)
    config = ReplicateConfig()
    config.group_ids = ["g"] * 8
    keys = [f"g{i}" for i in range(8)]
    grouped = {key: pattern(key, MIB) for key in keys}
    assert store.put_batch(keys, list(grouped.values()), config) == 0
    values = {f"k{i}": pattern(f"k{i}", MIB) for i in range(60)}
    put_all(store, values)
    kinds = {store.get_replica_desc(key)[0].is_memory_replica() for key in keys}
    assert len(kinds) == 1
    assert store.get_batch(keys) == list(grouped.values())
    assert [store.get(key) for key in values] == list(values.values())  # one by one: leases are short
