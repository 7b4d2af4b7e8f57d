"""Calls on batches: each key on its own, order kept, lists of plain ints."""

import signal
import time

import numpy as np
import pytest

from mooncake.client.prefixes import PrefixClient
from mooncake.errors import StoreError
from mooncake.rpc.messages import Need
from mooncake.store import ReplicateConfig
from mooncake.store.queries import MOST_KEYS
from tests.processes import wait_until

MIB = 1 << 20


@pytest.fixture
def memory(store):
    """8 MiB, registered, random."""
    data = np.random.default_rng(5).integers(0, 256, 8 * MIB, np.uint8)
    assert store.register_buffer(data.ctypes.data, data.nbytes) == 0
    return data


def test_put_batch_and_get_batch(store):
    assert store.put_batch(["a", "b", "c"], [b"1", b"22", b"333"]) == 0
    assert store.get_batch(["c", "no", "a"]) == [b"333", b"", b"1"]
    assert store.get_batch([]) == [b""]
    assert store.put_batch([], []) == 0
    assert store.put_batch(["a"], []) == -600
    assert store.put_batch(["d", "e"], [b"x", b""]) == -600
    assert store.batch_is_exist(["d", "e", "a", "zz"]) == [1, 0, 1, 0]


def test_batch_get_buffer(store):
    store.put_batch(["a", "b"], [b"1", b"22"])
    first, none, second = store.batch_get_buffer(["a", "no", "b"])
    assert (bytes(first), none, bytes(second)) == (b"1", None, b"22")


def test_longest_prefix(store):
    store.put_batch(["a", "b", "d"], [b"1", b"2", b"3"])
    assert store.longest_prefix(["a", "b", "c", "d"]) == 2
    assert store.longest_prefix(["c", "a"]) == 0
    assert store.longest_prefix([]) == 0
    assert store.batch_remove(["a", "b", "d"]) == [-706, -706, 0]  # what was found is leased
    store.close()
    assert store.longest_prefix(["a"]) == -600


def test_prefixes_are_asked_for_without_joining(master, store):
    keys = [f"{i:04}" for i in range(3000)]
    for rank in ("r0/", "r1/"):
        store.put_batch([rank + key for key in keys], [b"v"] * len(keys))
    store.remove("r1/2900")
    client = PrefixClient(master.address, 1.0)
    try:
        lists = [keys, keys[2901:], ["no", *keys], [], keys[:2]]
        assert client.lengths(["r0/", "r1/"], lists) == [2900, 99, 0, 0, 2]
        assert client.lengths(["r0/"], lists) == [3000, 99, 0, 0, 2]
        assert store.batch_remove(["r0/0000", "r1/2899", "r0/2999"]) == [-706] * 3
        with pytest.raises(StoreError):
            client.lengths([], [["a"]])
        windows = [Need(["r0/"]), Need(["r1/"], last=50), Need(["r0/", "r1/"], every=2, last=3, skip=1)]
        assert client.places(windows, [keys, keys[:2901], keys[:60], []], 2) == [3000, 2900, 60, 0]
        store.remove("r1/2990", force=True)
        assert client.places(windows, [keys], 2) == [2990]
        for wrong in ([], [Need(["r0/"], every=3)], [Need(["r0/"], last=-1)]):
            with pytest.raises(StoreError):
                client.places(wrong, [keys], 2)
        assert client.remove("^r1/") == 2998
        assert client.lengths(["r1/"], [keys]) == [0]
        master.kill()
        with pytest.raises(StoreError):
            client.lengths(["r0/"], [keys])
        assert client.down
    finally:
        client.close()


def test_batch_put_from_and_get_into(store, memory):
    base = memory.ctypes.data
    keys = [f"k{i}" for i in range(10)]
    assert store.batch_put_from(keys, [base + i * 1000 for i in range(10)], [1000] * 10) == [0] * 10
    room = np.zeros(20000, np.uint8)
    to = [room.ctypes.data + i * 2000 for i in range(10)]
    assert store.batch_get_into(keys, to, [2000] * 10) == [1000] * 10
    for i in range(10):
        assert (room[i * 2000 : i * 2000 + 1000] == memory[i * 1000 : i * 1000 + 1000]).all()
    assert store.batch_get_into(["k0", "no", "k1"], to[:3], [999, 10, 1000]) == [-600, -704, 1000]
    assert store.batch_get_into(["k0"], to[:2], [1000]) == [-600]
    assert store.batch_put_from(["x", "y"], [base, base], [0, 10]) == [-600, 0]
    assert store.batch_put_from(["x", "y"], [base], [10, 10]) == [-600, -600]
    assert store.batch_put_from(["d", "d"], [base, base + 50], [10, 10]) == [0, 0]
    assert store.get("d") == memory[:10].tobytes()
    assert store.batch_put_from([], [], []) == []


@pytest.mark.parametrize("pieces", [1, 3, 32, 100])
@pytest.mark.parametrize("size", [100, 4096, 16384])
def test_multi_buffers(store, memory, pieces, size):
    """Blocks as an engine has them: layer-outermost, keys in shuffled order."""
    keys = min(16, memory.nbytes // 2 // (pieces * size))
    base = memory.ctypes.data
    order = np.random.default_rng(1).permutation(keys).tolist()
    where = [[base + (layer * keys + order[k]) * size for layer in range(pieces)] for k in range(keys)]
    sizes = [[size] * pieces for _ in range(keys)]
    names = [f"{pieces}-{size}-{k}" for k in range(keys)]
    codes = store.batch_put_from_multi_buffers(names, where, sizes)
    assert codes == [0] * keys
    assert {type(code) for code in codes} == {int}
    half = memory.nbytes // 2
    want = memory[: keys * pieces * size].copy()
    got = store.batch_get_into_multi_buffers(names, [[p + half for p in ps] for ps in where], sizes)
    assert got == [pieces * size] * keys
    assert (memory[half : half + keys * pieces * size] == want).all()
    assert store.get(names[0]) == b"".join(memory[p - base : p - base + size].tobytes() for p in where[0])


def test_multi_buffers_ragged_unregistered_and_bad(store):
    data = np.random.default_rng(2).integers(0, 256, 10000, np.uint8)
    base = data.ctypes.data
    codes = store.batch_put_from_multi_buffers(
        ["a", "b", "c", "d"],
        [[base, base + 500], [base], [], [base + 7, base + 1000, base + 3]],
        [[10, 20], [10, 10], [], [3, 0, 2]],
    )
    assert codes == [0, -600, -600, 0]
    assert store.get("a") == data[:10].tobytes() + data[500:520].tobytes()
    assert store.get("d") == data[7:10].tobytes() + data[3:5].tobytes()
    room = np.zeros(100, np.uint8)
    to = room.ctypes.data
    assert store.batch_get_into_multi_buffers(["a"], [[to, to + 50]], [[25, 5]]) == [30]  # another split
    assert bytes(room[:25]) + bytes(room[50:55]) == store.get("a")
    assert store.batch_get_into_multi_buffers(["a"], [[to]], [[31]]) == [-800]
    assert store.batch_get_into_multi_buffers(["a"], [[to]], [[29]]) == [-600]
    assert store.batch_get_into_multi_buffers(["a"], [[to, to]], [[30]]) == [-800]
    assert store.batch_get_into_multi_buffers(["no"], [[to]], [[1]]) == [-704]


def test_any_number_of_pieces(store, memory):
    """More pieces than any queue or system call takes at once."""
    base, size, keys, pieces = memory.ctypes.data, 128, 64, 256
    where = [[base + (k * pieces + p) * size for p in range(pieces)] for k in range(keys)]
    sizes = [[size] * pieces for _ in range(keys)]
    names = [f"k{k}" for k in range(keys)]
    assert store.batch_put_from_multi_buffers(names, where, sizes) == [0] * keys
    half = memory.nbytes // 2
    assert (
        store.batch_get_into_multi_buffers(names, [[p + half for p in ps] for ps in where], sizes)
        == [size * pieces] * keys
    )
    assert (memory[half : half + keys * pieces * size] == memory[: keys * pieces * size]).all()


def test_get_into_ranges(store, memory):
    base = memory.ctypes.data
    store.put("a", b"0123456789")
    store.put("b", b"abcdefghij")
    got = store.get_into_ranges(
        [base, base + 1000],
        [["a", "b"], ["no"]],
        [[[0, 5], [100]], [[0]]],
        [[[8, 0], [3]], [[0]]],
        [[[2, 3], [8]], [[1]]],
    )
    assert got == [[[2, 3], [-600]], [[-704]]]
    assert bytes(memory[:2]) == b"89"
    assert bytes(memory[5:8]) == b"012"
    unregistered = np.zeros(10, np.uint8)
    assert store.get_into_ranges([unregistered.ctypes.data], [["a"]], [[[0]]], [[[0]]], [[[2]]]) == [[[-600]]]


def test_batch_remove_regex_and_all(store):
    store.put_batch([f"k{i}" for i in range(5)], [b"v"] * 5)
    assert store.is_exist("k4") == 1
    assert store.batch_remove(["k0", "no", "k4"]) == [0, -704, -706]
    assert store.remove_by_regex("k[12]") == 2
    assert store.remove_by_regex("[") == -600
    assert store.remove_by_regex("^x") == 0
    assert store.remove_all() == 1  # k4 is leased
    assert store.remove_all(force=True) == 1
    assert store.batch_is_exist([f"k{i}" for i in range(5)]) == [0] * 5


def test_batch_descriptors_hold_only_what_is_there(store):
    store.put("a", b"v")
    assert list(store.batch_get_replica_desc(["a", "no"])) == ["a"]


def test_a_configuration_may_be_used_again(store):
    config = ReplicateConfig()
    config.group_ids = ["g", "h"]
    assert store.put_batch(["a", "b"], [b"1", b"2"], config) == 0
    config.group_ids = ["g"]
    assert store.put("c", b"3", config) == 0
    assert config.group_ids == ["g"]


def test_addresses_that_are_no_numbers_leave_nothing_behind(store, master, memory):
    """They are only seen when the master has been asked already: what it granted is given back."""
    base = memory.ctypes.data

    def used() -> float:
        return master.metric("master_allocated_bytes")

    with pytest.raises(TypeError):
        store.batch_put_from_multi_buffers(["a", "b"], [[base], ["text"]], [[8], [8]])
    wait_until(lambda: used() == 0, 3)
    assert store.batch_is_exist(["a", "b"]) == [0, 0]
    assert store.batch_put_from_multi_buffers(["a", "b"], [[base], [base + 8]], [[8], [8]]) == [0, 0]
    with pytest.raises(TypeError):
        store.batch_get_into_multi_buffers(["a", "b"], [[base], ["text"]], [[8], [8]])
    assert store.batch_get_into_multi_buffers(["a", "b"], [[base + 64], [base + 128]], [[8], [8]]) == [8, 8]
    assert store.remove_all(True) == 2
    wait_until(lambda: used() == 0, 3, "the room, which no lease holds any more")


def test_more_keys_than_fit_one_question(store, master):
    """They are asked for in parts; a master that has stopped is waited for once."""
    keys = [f"a-key-as-engines-make-them@{i:040x}" for i in range(3 * MOST_KEYS + 7)]
    there = [0, MOST_KEYS - 1, MOST_KEYS, len(keys) - 1]
    assert store.put_batch([keys[i] for i in there], [b"v"] * 4) == 0
    found = store.batch_is_exist(keys)
    assert [i for i, one in enumerate(found) if one == 1] == there
    assert len(found) == len(keys) == found.count(0) + 4
    assert list(store.batch_get_replica_desc(keys)) == [keys[i] for i in there]
    removed = store.batch_remove(keys, True)
    assert [i for i, code in enumerate(removed) if code == 0] == there
    assert removed.count(-704) == len(keys) - 4
    master.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert set(store.batch_is_exist(keys)) == {-900}
        assert time.monotonic() - began < 3
    finally:
        master.signal(signal.SIGCONT)
