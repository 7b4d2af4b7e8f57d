"""The upsert family: exact results, and what becomes of pins, groups, readers and unfinished puts."""

import threading

import numpy as np
import pytest

from mooncake.store import ReplicateConfig, SoftPinAction
from tests.processes import wait_until

MIB = 1 << 20


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), np.uint8)


def config(**settings) -> ReplicateConfig:
    made = ReplicateConfig()
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def test_a_new_value_and_others_in_its_place(store):
    for value in (b"one", b"two", b"longer", b"s"):
        assert store.upsert("k", value) == 0
        assert store.get("k") == value
    assert store.upsert("k", b"") == -600
    assert store.upsert("", b"v") == -600
    assert store.upsert("k", bytes(32 * MIB + 1)) == -600
    with pytest.raises(TypeError):
        store.upsert("k", "text")
    assert store.get("k") == b"s"


def test_from_an_address(store):
    data = array(b"0123456789")
    assert store.upsert_from("k", data.ctypes.data, 10) == 0
    assert store.upsert_from("k", data.ctypes.data + 5, 5) == 0
    assert store.get("k") == b"56789"
    assert store.upsert_from("k", data.ctypes.data, 0) == 0
    assert store.get("k") == b"56789"


def test_parts(store):
    assert store.upsert_parts("k", b"ab", b"cd") == 0
    assert store.upsert_parts("k", b"x", bytearray(b"yz")) == 0
    assert store.get("k") == b"xyz"
    assert store.upsert_parts("k") == store.upsert_parts("k", b"") == 0
    assert store.get("k") == b"xyz"
    with pytest.raises(TypeError):
        store.upsert_parts("k", "text")


def test_batches(store):
    assert store.upsert_batch(["a", "b"], [b"1", b"22"]) == 0
    assert store.upsert_batch(["a", "c"], [b"9", b"8"]) == 0
    assert store.get_batch(["a", "b", "c"]) == [b"9", b"22", b"8"]
    assert store.upsert_batch([], []) == 0
    assert store.upsert_batch(["a", "b"], [b"1"]) == -600
    data = array(b"0123456789")
    base = data.ctypes.data
    assert store.batch_upsert_from(["a", "n"], [base, base], [5, 6]) == [0, 0]
    assert store.batch_upsert_from(["a", "b"], [base, base], [0, 6]) == [-600, 0]
    assert store.get_batch(["a", "b", "n"]) == [b"01234", b"012345", b"012345"]
    assert store.batch_upsert_from(["a", "b"], [base], [5]) == [-600, -600]
    assert store.batch_upsert_from([], [], []) == []
    assert store.batch_upsert_from(["twice", "twice"], [base, base + 5], [5, 5]) == [0, 0]
    assert store.get("twice") == b"56789"


def test_the_group_stays(store):
    assert store.put("g", b"v", config(group_ids=["one"])) == 0
    assert store.upsert("g", b"w") == 0
    assert store.upsert("g", b"x", config(group_ids=["two"])) == -600
    assert store.upsert("g", b"x", config(group_ids=[""])) == -600
    assert store.get("g") == b"w"
    assert store.upsert("g", b"y", config(group_ids=["one"])) == 0
    assert store.get("g") == b"y"
    assert store.put("free", b"v") == 0
    assert store.upsert("free", b"w", config(group_ids=["one"])) == -600


def test_pins_stay(make_master, make_store):
    master = make_master("--eviction_high_watermark_ratio=1.0", "--default_kv_lease_ttl=100")
    store = make_store(segment=16 * MIB, at=master)
    assert store.put("hard", b"v", config(with_hard_pin=True)) == 0
    soft = config(soft_pin_action=SoftPinAction.ENABLE, soft_pin_ttl_ms=3_600_000)
    assert store.put("soft", b"v", soft) == 0
    assert store.upsert_batch(["hard", "soft"], [b"new", b"new"]) == 0
    assert master.metric("master_soft_pin_key_count") == 1
    block = bytes(MIB)
    for i in range(40):
        assert store.put(f"fill{i}", block) == 0
    assert store.get_batch(["hard", "soft"]) == [b"new", b"new"]
    assert store.is_exist("fill0") == 0
    master.kill()
    master.start()
    wait_until(lambda: store.get("hard") == b"new", what="the recovered value")
    assert master.metric("master_soft_pin_key_count") == 1
    for i in range(40):
        wait_until(lambda i=i: store.put(f"again{i}", block) == 0, what="room")
    assert store.get_batch(["hard", "soft"]) == [b"new", b"new"]


def test_an_upsert_may_use_the_room_of_the_old_value(make_master, make_store):
    store = make_store(segment=16 * MIB, at=make_master())
    big = config(with_hard_pin=True)
    assert store.put("k", b"a" * (10 * MIB), big) == 0
    assert store.put("other", b"b" * (10 * MIB)) == -200
    assert store.upsert("k", b"c" * (10 * MIB)) == 0
    assert store.get("k") == b"c" * (10 * MIB)


def test_an_unfinished_put_is_pre_empted(make_store):
    writer, other = make_store(), make_store(segment=0)
    assert writer.batch_put_session_start(["k"], [4]) == [0]
    assert other.put("k", b"ignored") == 0
    assert other.upsert("k", b"upsert") == 0
    assert writer.batch_put_session_end(["k"])[0] < 0
    assert writer.get("k") == other.get("k") == b"upsert"


def test_readers_see_old_or_new_and_nothing_else(make_store, make_worker):
    store = make_store(segment=64 * MIB)
    values = [bytes([i]) * (64 << 10) for i in range(4)]
    assert store.put("k", values[0]) == 0
    worker = make_worker()
    worker.send(
        """
seen = []
import time
end = time.monotonic() + 3
while time.monotonic() < end:
    got = store.get("k")
    if len(set(got)) != 1 or len(got) != 64 << 10:
        seen.append([len(got), sorted(set(got))])
result = seen
"""
    )
    done = threading.Event()

    def write():
        i = 0
        while not done.is_set():
            i += 1
            assert store.upsert("k", values[i % 4]) == 0

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert worker.receive() == []
    finally:
        done.set()
        writer.join()


def test_not_set_up():
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.upsert("k", b"v") == store.upsert_parts("k", b"v") == store.upsert_batch(["k"], [b"v"]) == -600
    assert store.batch_upsert_from(["k"], [1], [1]) == [-600]
