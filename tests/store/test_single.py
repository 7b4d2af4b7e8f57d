"""Calls on one value: exact results, as the C++ library gives them."""

import numpy as np
import pytest

from mooncake.store import MooncakeDistributedStore, ReplicaStatus, ReplicateConfig, SoftPinAction

MIB = 1 << 20


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), np.uint8)


def test_put_and_get(store):
    assert store.put("k", b"value") == 0
    assert store.get("k") == b"value"
    assert type(store.get("k")) is bytes
    assert store.get_size("k") == 5
    assert store.is_exist("k") == 1
    assert type(store.is_exist("k")) is int


def test_what_is_not_there(store):
    assert store.get("no") == b""
    assert store.get_buffer("no") is None
    assert store.get_size("no") == -704
    assert store.is_exist("no") == 0
    assert store.get_replica_desc("no") == []
    assert store.remove("no") == -704
    room = array(b"\7" * 10)
    assert store.get_into("no", room.ctypes.data, 10) == -704
    assert bytes(room) == b"\7" * 10


def test_an_existing_key_keeps_its_value(store):
    assert store.put("k", b"old") == 0
    assert store.put("k", b"newer") == 0
    assert store.get("k") == b"old"


@pytest.mark.parametrize(
    "value", [b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), np.frombuffer(b"bytes", np.uint8)]
)
def test_buffers_of_every_kind(store, value):
    assert store.put("k", value) == 0
    assert store.get("k") == b"bytes"


def test_bytes_are_counted_in_elements(store):
    assert store.put("k", np.array([1, 2, 3, 4], np.float32)) == 0
    assert store.get("k") == np.array([1], np.float32).tobytes()


def test_bad_puts(store):
    assert store.put("k", b"") == -600
    assert store.put("", b"x") == -600
    assert store.put("k", bytes(32 * MIB + 1)) == -600  # larger than the local buffer
    with pytest.raises(TypeError):
        store.put("k", "text")
    assert store.is_exist("k") == 0


def test_put_from_and_get_into(store):
    data = array(bytes(range(256)) * 40)
    room = array(bytes(len(data) + 10))
    assert store.put_from("k", data.ctypes.data, len(data)) == 0
    assert store.get_into("k", room.ctypes.data, len(room)) == len(data)
    assert bytes(room[: len(data)]) == bytes(data)
    assert not room[len(data) :].any()
    assert store.get_into("k", room.ctypes.data, len(data) - 1) == -600
    assert store.put_from("empty", data.ctypes.data, 0) == 0
    assert store.is_exist("empty") == 0


def test_put_from_with_metadata(store):
    head, data = array(b"head"), array(b"data")
    assert store.put_from_with_metadata("k", data.ctypes.data, head.ctypes.data, 4, 4) == 0
    assert store.get("k") == b"headdata"
    assert store.put_from_with_metadata("", data.ctypes.data, head.ctypes.data, 4, 4) == 600


def test_put_parts(store):
    assert store.put_parts("k", b"ab", bytearray(b"cd"), b"", np.frombuffer(b"e", np.uint8)) == 0
    assert store.get("k") == b"abcde"
    assert store.put_parts("none") == 0
    assert store.put_parts("empty", b"", b"") == 0
    assert store.is_exist("none") == store.is_exist("empty") == 0
    for bad, error in (("text", TypeError), (3, TypeError), (np.zeros((2, 2), np.uint8), RuntimeError)):
        with pytest.raises(error):
            store.put_parts("k2", bad)
    with pytest.raises(RuntimeError):
        store.put_parts("k2", np.zeros(4, np.float32))
    assert store.is_exist("k2") == 0


def test_get_buffer(store):
    data = bytes(range(256)) * 100
    store.put("k", data)
    handle = store.get_buffer("k")
    assert len(handle) == handle.size() == len(data)
    assert bytes(handle) == bytes(memoryview(handle)) == data
    assert np.frombuffer(handle, np.uint8).ctypes.data == handle.ptr()
    view = memoryview(handle)
    assert view.ndim == 1
    assert view.itemsize == 1
    assert not view.readonly
    view[0] = 99
    assert store.get("k") == data


def test_leases_and_force(store):
    store.put("k", b"v")
    assert store.is_exist("k") == 1
    assert store.remove("k") == -706
    assert store.remove("k", force=True) == 0
    assert store.is_exist("k") == 0
    store.put("fresh", b"v")
    assert store.remove("fresh") == 0  # a put grants no lease


def test_replica_descriptors(store):
    store.put("k", b"v" * 1000)
    (replica,) = store.get_replica_desc("k")
    assert replica.is_memory_replica()
    assert not replica.is_disk_replica()
    assert not replica.is_local_disk_replica()
    assert replica.status == ReplicaStatus.COMPLETE
    where = replica.get_memory_descriptor().buffer_descriptor
    assert where.size == 1000
    assert where.transport_endpoint.startswith("127.0.0.1:")
    assert repr(where).startswith("<Descriptor size=1000 buffer_address=")
    with pytest.raises(RuntimeError):
        replica.get_disk_descriptor()


def test_replicate_config():
    config = ReplicateConfig()
    assert hasattr(ReplicateConfig, "group_ids")
    assert str(config).startswith("ReplicateConfig: { replica_num: 1, nof_replica_num: 0, ")
    assert str(config).endswith("data_type: UNKNOWN }")
    with pytest.raises(AttributeError):
        config.with_soft_pin = True
    for bad in (-1, 1 << 64, "1"):
        with pytest.raises(TypeError):
            config.soft_pin_ttl_ms = bad


@pytest.mark.parametrize(
    "settings",
    [
        {"replica_num": 0},
        {"nof_replica_num": 1},
        {"soft_pin_ttl_ms": 5},
        {"soft_pin_action": SoftPinAction.DISABLE, "soft_pin_ttl_ms": 5},
        {"soft_pin_action": SoftPinAction.ENABLE, "soft_pin_ttl_ms": 86400001},
        {"prefer_alloc_in_same_node": True},
        {"group_ids": ["a", "b"]},
        {"group_ids": []},
    ],
)
def test_configurations_that_are_refused(store, settings):
    config = ReplicateConfig()
    for name, value in settings.items():
        setattr(config, name, value)
    assert store.put("k", b"v", config) == -600
    assert store.is_exist("k") == 0


def test_registering_memory(store):
    room = array(bytes(10000))
    base = room.ctypes.data
    assert store.register_buffer(base, 5000) == 0
    assert store.register_buffer(base, 5000) == -600
    assert store.register_buffer(base + 4999, 10) == -600
    assert store.register_buffer(base + 5000, 10) == 0
    assert store.register_buffer(0, 10) == -600
    assert store.register_buffer(base + 6000, 0) == -600
    assert store.register_buffer(1 << 46, 4096) == -600  # not mapped
    assert store.unregister_buffer(base + 1) == -600
    assert store.unregister_buffer(base) == 0
    assert store.unregister_buffer(base) == -600


def test_values_of_many_sizes(store):
    rng = np.random.default_rng(0)
    for size in (1, 2, 255, 256, 257, 4095, 4096, 4097, 65536, 100001, 1 << 20, (8 << 20) + 3):
        data = rng.integers(0, 256, size, np.uint8).tobytes()
        assert store.put(f"k{size}", data) == 0
        assert store.get(f"k{size}") == data


def test_a_store_that_is_not_set_up():
    store = MooncakeDistributedStore()
    assert store.health_check() == 1
    assert store.put("k", b"v") == -600
    assert store.get("k") == b""
    assert store.get_batch(["a", "b"]) == [b"", b""]
    assert store.get_buffer("k") is None
    assert store.put_from("k", 1, 1) == -600
    assert store.is_exist("k") == -600
    assert store.batch_put_from_multi_buffers(["k"], [[1]], [[1]]) == []
    assert store.remove_all() == -600
    assert store.close() == 0


def test_after_close(make_store):
    store = make_store()
    store.put("k", b"v")
    assert store.health_check() == 0
    assert store.close() == 0
    assert store.close() == 0
    assert store.health_check() == 1
    assert store.get("k") == b""
    assert store.put("k", b"v") == -600
    assert store.batch_put_from_multi_buffers(["k"], [[1]], [[1]]) == []


def test_no_local_buffer(make_store):
    store = make_store(buffer=0)
    data = array(b"0123456789")
    assert store.put("k", b"v") == -600
    assert store.put_from("k", data.ctypes.data, 10) == 0
    assert store.get("k") == b""
    assert store.get_buffer("k") is None
    room = array(bytes(10))
    assert store.get_into("k", room.ctypes.data, 10) == 10
    assert bytes(room) == b"0123456789"
