"""Put sessions and get sessions: exact results, and what a session that never ends leaves behind."""

import numpy as np

from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from tests.processes import wait_until

MIB = 1 << 20


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), np.uint8)


def test_a_value_written_in_pieces(store):
    data = array(b"0123456789")
    base = data.ctypes.data
    assert store.batch_put_session_start(["a", "b"], [10, 8]) == [0, 0]
    assert store.is_exist("a") == 0
    assert store.get_size("a") == store.remove("a") == -703
    assert store.get("a") == b""
    assert store.put("a", b"other") == 0
    write = store.batch_put_from_multi_buffer_ranges
    assert write(["a"], [[base, base + 6]], [[4, 4]], [[0, 6]]) == [8]
    assert write(["a", "b"], [[base + 4], [base]], [[2], [8]], [[4], [0]]) == [2, 8]
    assert store.batch_put_session_end(["a", "unknown"]) == [0, -600]
    assert store.get("a") == b"0123456789"
    assert store.batch_put_session_end(["a"]) == [-600]
    assert store.batch_put_session_revoke(["b", "unknown"]) == [0, -600]
    assert store.is_exist("b") == 0
    assert store.batch_put_session_revoke(["b"]) == [-600]
    assert store.put("b", b"again") == 0
    assert store.get("b") == b"again"


def test_starts_that_are_refused(store):
    assert store.put("there", b"v") == 0
    start = store.batch_put_session_start
    assert start(["there", "new"], [10, 5]) == [-705, 0]
    assert start(["new"], [5]) == [-600]
    assert start([], []) == []
    assert start(["q"], []) == start(["q"], [0]) == start([""], [4]) == [-600]
    assert start(["twice", "twice"], [4, 4]) == [0, -705]
    assert start(["huge"], [1 << 40]) == [-200]
    config = ReplicateConfig()
    config.replica_num = 0
    assert start(["q"], [4], config) == [-600]
    assert store.batch_put_session_revoke(["new", "twice"]) == [0, 0]


def test_writes_that_are_refused(store):
    data = array(b"0123456789")
    base = data.ctypes.data
    write = store.batch_put_from_multi_buffer_ranges
    assert store.batch_put_session_start(["a"], [10]) == [0]
    assert write(["a"], [[base]], [[4]], [[8]]) == [-600]
    assert write(["a"], [[base]], [[4, 4]], [[0]]) == [-600]
    assert write(["a", "b"], [[base]], [[4]], [[0]]) == [-600, -600]
    assert write(["unknown"], [[base]], [[4]], [[0]]) == [-600]
    assert write(["a"], [[]], [[]], [[]]) == [-702]
    assert write(["a"], [[base]], [[0]], [[0]]) == [0]
    assert write(["a"], [[1 << 46]], [[4]], [[0]]) == [-800]
    assert write([], [], [], []) == []
    assert write(["a"], [[base, base]], [[4, 4]], [[2, 3]]) == [8]
    assert store.batch_put_session_end(["a"]) == [0]
    assert store.get("a") == b"\0\0" + b"00123" + b"\0\0\0"


def test_a_value_read_in_pieces(store):
    store.put_batch(["a", "b"], [b"0123456789", b"abcdefgh"])
    room = array(bytes(16))
    base = room.ctypes.data
    read = store.batch_get_into_multi_buffer_ranges
    assert read(["a"], [[base]], [[4]], [[0]]) == [-600]
    assert store.batch_get_session_start(["a", "no", "b"]) == [0, -704, 0]
    assert store.batch_get_session_start(["a"]) == [0]
    assert read(["a", "b"], [[base, base + 8], [base + 4]], [[4, 4], [4]], [[0, 6], [4]]) == [8, 4]
    assert bytes(room) == b"0123efgh6789\0\0\0\0"
    assert read(["a"], [[base]], [[4]], [[8]]) == [-600]
    assert read(["a"], [[base]], [[4]], [[8, 1]]) == [-600]
    assert read(["a", "b"], [[base]], [[4]], [[0]]) == [-600, -600]
    assert read(["a"], [[]], [[]], [[]]) == read(["a"], [[base]], [[0]], [[0]]) == [0]
    assert read(["a"], [[1 << 46]], [[4]], [[0]]) == [-800]
    assert store.remove("a") == -706
    assert store.remove("a", force=True) == 0
    assert read(["a"], [[base]], [[4]], [[2]]) == [4]  # the session holds the bytes
    assert bytes(room[:4]) == b"2345"
    assert store.batch_get_session_end(["a", "no"]) == 0
    assert store.batch_get_session_end(["a"]) == store.batch_get_session_end([]) == 0
    assert read(["a"], [[base]], [[4]], [[0]]) == [-600]
    assert store.batch_get_session_start([]) == []
    assert store.batch_get_session_start([""]) == [-704]
    assert store.batch_get_session_start(["b", "b"]) == [0, 0]


def test_a_session_does_not_outlive_its_lease(make_master, make_store):
    store = make_store(at=make_master("--default_kv_lease_ttl=300"))
    store.put("a", b"0123456789")
    room = array(bytes(16))
    base = room.ctypes.data
    assert store.batch_get_session_start(["a"]) == [0]
    ask = store.batch_get_into_multi_buffer_ranges
    wait_until(lambda: ask(["a"], [[base]], [[4]], [[0]]) == [-707], what="the end of the lease")
    assert store.batch_get_session_end(["a"]) == 0


def test_what_a_session_held_comes_back(master, store):
    store.put_batch(["a", "b"], [b"1", b"2"])
    assert store.batch_get_session_start(["a", "b"]) == [0, 0]
    assert store.batch_remove(["a", "b"], force=True) == [0, 0]
    assert store.batch_get_session_end(["a"]) == 0
    assert master.metric("master_allocated_bytes") > 0
    assert store.batch_get_session_end(["b"]) == 0
    wait_until(lambda: master.metric("master_allocated_bytes") == 0, limit=5, what="the return of the room")


def test_over_tcp_and_with_replicas(make_store, make_worker, monkeypatch):
    make_store(segment=64 * MIB)
    make_store(segment=64 * MIB)
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    store = make_store(segment=0)
    data = array(np.random.default_rng(1).integers(0, 256, 3 * MIB, np.uint8).tobytes())
    config = ReplicateConfig()
    config.replica_num = 2
    assert store.batch_put_session_start(["a"], [len(data)], config) == [0]
    base, half = data.ctypes.data, 3 * MIB // 2
    for at in (half, 0):
        assert store.batch_put_from_multi_buffer_ranges(["a"], [[base + at]], [[half]], [[at]]) == [half]
    assert store.batch_put_session_end(["a"]) == [0]
    assert len(store.get_replica_desc("a")) == 2
    assert store.get("a") == bytes(data)
    room = array(bytes(len(data)))
    assert store.batch_get_session_start(["a"]) == [0]
    base = room.ctypes.data
    assert store.batch_get_into_multi_buffer_ranges(["a"], [[base + half, base]], [[half, half]], [[half, 0]]) == [
        len(data)
    ]
    assert bytes(room) == bytes(data)
    assert store.transfer_stats()["tcp"] > 0


def test_a_writer_that_dies_leaves_nothing(master, make_store, make_worker):
    store = make_store(segment=16 * MIB)
    worker = make_worker()
    assert worker("result = store.batch_put_session_start(['a'], [12 << 20])") == [0]
    assert store.is_exist("a") == 0
    worker.kill()
    wait_until(lambda: master.metric("master_allocated_bytes") == 0, limit=15, what="the return of the room")
    assert store.put("a", b"v") == 0


def test_not_set_up():
    store = MooncakeDistributedStore()
    assert store.batch_put_session_start(["k"], [1]) == []
    assert store.batch_put_from_multi_buffer_ranges(["k"], [[1]], [[1]], [[0]]) == []
    assert store.batch_put_session_end(["k"]) == store.batch_put_session_revoke(["k"]) == []
    assert store.batch_get_session_start(["k"]) == []
    assert store.batch_get_into_multi_buffer_ranges(["k"], [[1]], [[1]], [[0]]) == []
    assert store.batch_get_session_end(["k"]) == -1
