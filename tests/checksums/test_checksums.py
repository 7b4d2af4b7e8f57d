"""Whatever becomes of a value's bytes on the way from its writer to its reader: a counted miss, never other bytes."""

import ctypes
import os
import time

import numpy as np
import pytest

from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from mooncake.transfer.checksums import PENDING, Sums, checksum
from tests.checksums.conftest import MIB, counted, damage, flip, places, spoil_disk
from tests.processes import wait_until
from tests.ssd.conftest import disk, make_disk_store, settled  # noqa: F401  (fixtures)

MISMATCH, MISSING = -801, -704
SIZES = [1, 100, 4096, 65_536, 700_001, 3 * MIB + 5]


def value_of(size: int, salt: int = 0) -> bytes:
    return np.random.default_rng(size + salt).integers(0, 256, size, np.uint8).tobytes()


def reader_of(master, cleanup, segment: int = 0) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 64 * MIB, "tcp", "", master.address) == 0
    cleanup.callback(store.close)
    return store


# ---------------------------------------------------------------- sums


def test_sums_do_not_depend_on_how_the_bytes_come():
    rng = np.random.default_rng(11)
    for _ in range(50):
        lengths = rng.integers(1, 5000, rng.integers(1, 6)).tolist()
        whole = rng.integers(0, 256, sum(lengths), np.uint8).tobytes()
        ends = np.cumsum(lengths).tolist()
        wanted = [checksum([memoryview(whole)[end - n : end]]) for end, n in zip(ends, lengths, strict=True)]
        sums = Sums(lengths)
        for _ in range(2):
            sums.restart()
            at = 0
            while at < len(whole):
                step = int(rng.integers(1, 4000))
                sums.add(memoryview(whole)[at : at + step])
                at += step
            assert sums.found == wanted
        assert all(1 << 63 <= found < PENDING for found in wanted)


# ---------------------------------------------------------------- every way in, every way out


def put_whole(store, key: str, value: bytes) -> int:
    return store.put(key, value)


def put_pieces(store, key: str, value: bytes) -> int:
    room = ctypes.create_string_buffer(value, len(value))
    base, cut = ctypes.addressof(room), max(1, len(value) // 3)
    sizes = [min(cut, len(value) - at) for at in range(0, len(value), cut)]
    where = [base + at for at in range(0, len(value), cut)]
    return store.batch_put_from_multi_buffers([key], [where], [sizes])[0]


def put_session(store, key: str, value: bytes) -> int:
    room = ctypes.create_string_buffer(value, len(value))
    assert store.batch_put_session_start([key], [len(value)]) == [0]
    written = store.batch_put_from_multi_buffer_ranges([key], [[ctypes.addressof(room)]], [[len(value)]], [[0]])
    assert written == [len(value)]
    return store.batch_put_session_end([key])[0]


def put_over(store, key: str, value: bytes) -> int:
    return store.put(key, b"before") or store.upsert(key, value)


def get_whole(store, key: str, size: int) -> bytes | int:
    return store.get(key) or MISMATCH


def get_handle(store, key: str, size: int) -> bytes | int:
    handle = store.get_buffer(key)
    return MISMATCH if handle is None else bytes(handle)


def get_into(store, key: str, size: int) -> bytes | int:
    room = ctypes.create_string_buffer(size)
    code = store.get_into(key, ctypes.addressof(room), size)
    return room.raw if code == size else code


def get_pieces(store, key: str, size: int) -> bytes | int:
    room = ctypes.create_string_buffer(size)
    base, cut = ctypes.addressof(room), max(1, size // 5)
    sizes = [min(cut, size - at) for at in range(0, size, cut)]
    code = store.batch_get_into_multi_buffers([key], [[base + at for at in range(0, size, cut)]], [sizes])[0]
    return room.raw if code == size else code


def get_ranges(store, key: str, size: int) -> bytes | int:
    """The last half, then the first: neither alone says anything about the other's bytes."""
    room = ctypes.create_string_buffer(size)
    base, half = ctypes.addressof(room), size // 2
    assert store.register_buffer(base, size) == 0
    parts = [(half, size - half), *([(0, half)] if half else [])]
    offsets, sizes = [at for at, _ in parts], [n for _, n in parts]
    codes = store.get_into_ranges([base], [[key]], [[offsets]], [[offsets]], [[sizes]])[0][0]
    assert store.unregister_buffer(base) == 0
    return room.raw if codes == sizes else codes[0]


def get_session(store, key: str, size: int) -> bytes | int:
    room = ctypes.create_string_buffer(size)
    assert store.batch_get_session_start([key]) == [0]
    code = store.batch_get_into_multi_buffer_ranges([key], [[ctypes.addressof(room)]], [[size]], [[0]])[0]
    store.batch_get_session_end([key])
    return room.raw if code == size else code


PUTS = [put_whole, put_pieces, put_session, put_over]
GETS = [get_whole, get_handle, get_into, get_pieces, get_ranges, get_session]


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_every_way_in_and_out(master, make_store, cleanup, monkeypatch, way):
    """Good bytes come back by every way; a changed byte is a miss by every way, counted once by either side."""
    monkeypatch.setenv("MOONCAKE_STORE_CHECKSUM", "always" if way == "shm" else "tcp")
    make_store(64 * MIB)
    if way == "tcp":
        monkeypatch.setenv("MC_FORCE_TCP", "1")
    store = reader_of(master, cleanup)
    damaged = 0
    for n, size in enumerate(SIZES):
        for p, put in enumerate(PUTS):
            for g, get in enumerate(GETS):
                if (p + g + n) % 3:  # a third of all, another one for each size
                    continue
                key = f"{put.__name__}-{get.__name__}-{size}"
                value = value_of(size, p)
                assert put(store, key, value) == 0
                assert get(store, key, size) == value, key
                damage(store, key, at=size // 3)
                assert get(store, key, size) == MISMATCH, key
                damaged += 1
                assert store.is_exist(key) == 0
    assert counted(store) == damaged
    assert master.metric("mooncake_checksum_mismatches_total") == damaged
    assert store.transfer_stats()["tcp" if way == "shm" else "shm"] == 0


def test_another_replica_is_read(master, make_store, cleanup, always):
    make_store(32 * MIB)
    other = reader_of(master, cleanup, 32 * MIB)
    config = ReplicateConfig()
    config.replica_num = 2
    value = value_of(100_000)
    for key in ("a", "b"):
        assert other.put(key, value, config) == 0
        assert len(places(other, key)) == 2
    own = next(n for n, place in enumerate(places(other, "a")) if other._client.attachments.distance(place[0]) == 0)
    damage(other, "a", own, 77)
    assert other.get("a") == value
    assert counted(other) == 1
    assert len(places(other, "a")) == 1
    assert other.get("a") == value
    assert counted(other) == 1
    for replica in (0, 1):
        damage(other, "b", replica)
    assert other.batch_get_into(["b"], [1 << 40], [100_000])[0] < 0
    assert other.get("b") == b""
    assert other.is_exist("b") == 0


def test_a_value_in_parts(master, make_store, cleanup, always):
    """Larger than either segment: no part alone has the checksum."""
    make_store(16 * MIB)
    store = reader_of(master, cleanup, 16 * MIB)
    value = value_of(24 * MIB)
    for at in range(2):
        assert store.put("large", value) == 0
        [place] = places(store, "large")
        assert len(set(place[0::3])) == 2
        assert store.get("large") == value
        segment, offset, _ = place[3 * at : 3 * at + 3]
        flip(segment, offset + 5)
        assert store.get("large") == b""
        assert store.is_exist("large") == 0
    assert counted(store) == 2


def test_batches_name_the_damaged_only(master, make_store, cleanup, always):
    make_store(64 * MIB)
    store = reader_of(master, cleanup)
    values = {f"k{n}": value_of(200_000, n) for n in range(20)}
    assert store.put_batch(list(values), list(values.values())) == 0
    for n in (3, 11):
        damage(store, f"k{n}", at=199_999)
    got = store.get_batch(list(values))
    assert [value == whole for value, whole in zip(got, values.values(), strict=True)] == [
        n not in (3, 11) for n in range(20)
    ]
    assert got[3] == got[11] == b""


# ---------------------------------------------------------------- who writes and who reads how


def test_modes_of_writer_and_reader(master, make_store, cleanup, monkeypatch):
    """What has no checksum is read by everybody; who does not look gets what is there."""
    make_store(32 * MIB)
    stores = {}
    for mode in ("off", "tcp", "always"):
        monkeypatch.setenv("MOONCAKE_STORE_CHECKSUM", mode)
        stores[mode] = reader_of(master, cleanup)
        assert stores[mode].put(mode, value_of(5000)) == 0
    for store in stores.values():
        assert store.get_batch(list(stores)) == [value_of(5000)] * 3
    for key in stores:
        damage(stores["off"], key)
    seen = {mode: [store.get(key) != b"" for key in ("off", "tcp")] for mode, store in stores.items()}
    assert seen == {mode: [True, True] for mode in stores}  # neither went over tcp
    assert stores["tcp"].get("always") not in (b"", value_of(5000))
    assert stores["always"].get("always") == b""


def test_a_wrong_word_is_refused(master, monkeypatch, caplog):
    monkeypatch.setenv("MOONCAKE_STORE_CHECKSUM", "sometimes")
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", master.address) == -1
    assert "MOONCAKE_STORE_CHECKSUM is 'sometimes'; expected one of off, tcp, always" in caplog.text


# ---------------------------------------------------------------- where bytes may change


@pytest.mark.parametrize("size", [40_000, 5 * MIB])
@pytest.mark.parametrize("back", [False, True], ids=["put", "get"])
def test_a_relay_that_changes_a_byte(master, make_store, cleanup, monkeypatch, relayed, back, size):
    make_store(64 * MIB)
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    monkeypatch.setenv("MOONCAKE_STORE_CHECKSUM", "tcp")
    plain = reader_of(master, cleanup)
    store = reader_of(master, cleanup)
    relays = relayed(store, back, size // 2 + 1000)
    value = value_of(size)
    assert store.put("v", value) == 0
    reader = plain if not back else store
    assert reader.get("v") == b""
    assert [relay.spoilt for relay in relays] == [1]
    assert counted(reader) == 1
    assert reader.get("v") == b""
    assert store.put("v", value) == 0
    assert store.get("v") == value == plain.get("v")


def test_a_new_master_knows_them(master, make_store, cleanup, always):
    """From the tables, plain records and others alike."""
    make_store(64 * MIB)
    store = reader_of(master, cleanup)
    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    values = {f"k{n}": value_of(3000 + n) for n in range(40)}
    for n, (key, value) in enumerate(values.items()):
        assert store.put(key, value, pinned if n % 2 else ReplicateConfig()) == 0
    master.kill()
    master.start()
    wait_until(lambda: store.batch_is_exist(list(values)) == [1] * 40, 20, "the directory")
    assert store.get_batch(list(values)) == list(values.values())
    for key in ("k6", "k7"):
        damage(store, key, at=2999)
        assert store.get(key) == b""
    assert counted(store) == 2


def test_copies_keep_them(master, make_store, cleanup, always):
    first = make_store(32 * MIB)
    second = reader_of(master, cleanup, 32 * MIB)
    config = ReplicateConfig()
    config.preferred_segment = first.get_hostname()
    value = value_of(300_000)
    assert first.put("v", value, config) == 0
    task, code = first.create_move_task("v", first.get_hostname(), second.get_hostname())
    assert code == 0
    wait_until(lambda: int(first.query_task(task)[0].status) == 3, what="the move")
    wait_until(lambda: len(places(first, "v")) == 1)
    assert first.get("v") == value
    damage(first, "v", at=250_000)
    assert first.get("v") == b""
    assert counted(first) == 1


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_values_on_disk(make_master, make_disk_store, cleanup, always, disk, where):  # noqa: F811
    """Damaged before they were written, or there."""
    master = make_master("--enable_offload", "--offload_on_evict", "--default_kv_lease_ttl=100")
    store = make_disk_store(master, 16 * MIB)
    values = {f"k{n}": value_of(50_000, n) for n in range(8)}
    for key, value in values.items():
        assert store.put(key, value) == 0
    if where == "memory":
        damage(store, "k0", at=2000)
    for n in range(48):
        time.sleep(0.2 if n == 24 else 0)  # nothing is leased any more
        wait_until(lambda n=n: store.put(f"filler{n}", bytes(MIB)) == 0, 20, "a put")
    wait_until(lambda: settled(master))
    assert places(store, "k0")[0][0] < 0
    good = [key for key in values if key != "k0" and places(store, key)[0][0] < 0]
    assert good
    if where == "disk":
        assert store.get(good[-1]) == values[good[-1]]
        assert spoil_disk(disk)
    else:
        assert store.get_batch(good) == [values[key] for key in good]
    assert store.get("k0") == b""
    wait_until(lambda: store.is_exist("k0") == 0, what="the miss")


def test_no_descriptor_is_left(master, make_store, cleanup, always):
    make_store(32 * MIB)
    store = reader_of(master, cleanup)
    value = value_of(100_000)

    def round_trip(n: int) -> None:
        assert store.put(f"k{n}", value) == 0
        damage(store, f"k{n}")
        assert get_ranges(store, f"k{n}", len(value)) == MISMATCH

    round_trip(0)
    before = len(os.listdir("/proc/self/fd"))
    for n in range(1, 20):
        round_trip(n)
    assert len(os.listdir("/proc/self/fd")) == before
    wait_until(lambda: master.metric("mooncake_quarantined_bytes") == 0, what="the quarantine's end")
    assert master.metric("master_allocated_bytes") == 0
