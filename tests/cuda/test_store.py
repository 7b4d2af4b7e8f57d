"""The store's calls with addresses of device memory, on a stand-in for the CUDA driver."""

import pytest

MIB = 1 << 20

ROUND_TRIPS = """
from mooncake.store import ReplicateConfig

def layout(rng, blocks, sizes):
    "Scattered pieces that do not overlap, within one allocation: (total, [(offset, size)])."
    at, pieces = rng.randrange(64), []
    for _ in range(blocks):
        size = rng.choice(sizes)
        pieces.append((at, size))
        at += size + rng.choice([0, 0, size, 48])
    rng.shuffle(pieces)
    return at + 1, pieces

def round_trip(seed, sizes, keys, blocks, registered=True, gpu=0, host_target=False):
    rng = random.Random(seed)
    sizes = [eval(size) if isinstance(size, str) else size for size in sizes]
    total, pieces = layout(rng, keys * blocks, sizes)
    if min(sizes) % 16 == 0:
        pieces = [(at & ~15, size) for at, size in pieces]  # as engines' blocks lie
        pieces.sort(); fixed = []; end = 0
        for at, size in pieces:
            at = max(at, end); fixed.append((at, size)); end = at + size
        rng.shuffle(fixed); pieces = fixed; total = end + 1
    source, data = device_memory(total, gpu), noise(total, seed)
    fill(source, data)
    names = [f"{seed}-{i}" for i in range(keys)]
    parts = [pieces[i::keys] for i in range(keys)]
    if registered:
        assert store.register_buffer(source, total) == 0
    where = [[source + at for at, _ in part] for part in parts]
    lengths = [[size for _, size in part] for part in parts]
    assert store.batch_put_from_multi_buffers(names, where, lengths) == [0] * keys
    if host_target:
        room = np.zeros(total, np.uint8); target = room.ctypes.data
    else:
        target = device_memory(total, gpu); fill(target, bytes(total))
    if registered:
        assert store.register_buffer(target, total) == 0
    back = [[target + at for at, _ in part] for part in parts]
    assert store.batch_get_into_multi_buffers(names, back, lengths) == [sum(n) for n in lengths]
    got = room.tobytes() if host_target else content(target, total)
    wanted = bytearray(total)
    for at, size in pieces:
        wanted[at : at + size] = data[at : at + size]
    assert got == bytes(wanted), "other bytes than were put"
    for name, part in zip(names, parts):
        assert store.get(name) == b"".join(data[at : at + size] for at, size in part)
    if registered:
        assert store.unregister_buffer(source) == 0 and store.unregister_buffer(target) == 0
    cuda.fake_free(source)
    if not host_target:
        cuda.fake_free(target)
    store.remove_all(True)
    return sound()
"""

KINDS = {
    "blocks of 32 KiB": {"sizes": [32 << 10], "keys": 8, "blocks": 16},
    "more than all lanes hold": {"sizes": [64 << 10], "keys": 20, "blocks": 32},
    "ragged": {"sizes": [16, 4096, 48 << 10, 32 << 10], "keys": 7, "blocks": 33},
    "odd": {"sizes": [1, 17, 333, 4099, 70001], "keys": 5, "blocks": 40},
    "large": {"sizes": [1 << 20, 2 << 20], "keys": 4, "blocks": 4},
    "one": {"sizes": [4096], "keys": 1, "blocks": 1},
    "second GPU": {"sizes": [32 << 10], "keys": 4, "blocks": 8, "gpu": 1},
    "into host memory": {"sizes": [32 << 10], "keys": 4, "blocks": 8, "host_target": True},
    "not registered": {"sizes": [32 << 10, 500], "keys": 4, "blocks": 8, "registered": False},
}


@pytest.mark.parametrize("way", ["own segment", "other segment", "tcp", "file"])
def test_what_was_put_comes_back(way, pace, master, make_gpu_worker, make_worker, monkeypatch, tmp_path):
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    if way in ("other segment", "tcp"):
        make_worker(segment=64 * MIB)
    if way == "tcp":
        monkeypatch.setenv("MC_FORCE_TCP", "1")
    worker = make_gpu_worker(master, segment=64 * MIB if way == "own segment" else 0)
    worker(ROUND_TRIPS)
    if way == "file":
        (tmp_path / "file").write_bytes(bytes(64 * MIB))
        assert worker("result = store.mount_segment(path, 64 << 20)['ret']", path=str(tmp_path / "file")) == 0
    for seed, options in enumerate(KINDS.values()):
        assert worker("result = round_trip(seed, **options)", seed=seed, options=options) is True
    moved = worker("result = store.transfer_stats()")
    assert moved[{"other segment": "shm", "tcp": "tcp"}.get(way, "local")] > 0
    assert sum(value > 0 for value in moved.values()) == 1


@pytest.mark.parametrize(
    "lack",
    [
        {"FAKE_CUDA_NO_PINS": 1},
        {"FAKE_CUDA_MEMORY": 60 << 20},
        {"MC_STORE_PIN_MEMORY_MAX_BYTES": 0},
        {"FAKE_CUDA_MEMORY": 60 << 20, "MC_STORE_PIN_MEMORY_MAX_BYTES": 0},
    ],
)
def test_what_the_machine_lacks_costs_speed_only(lack, pace, master, make_gpu_worker):
    """Pool memory that cannot be pinned, and GPUs that are full."""
    worker = make_gpu_worker(master, **lack)
    worker(ROUND_TRIPS)
    if "FAKE_CUDA_MEMORY" in lack:
        worker("hog = device_memory(40 << 20)")
    for seed, name in enumerate(("ragged", "odd", "large")):
        assert worker("result = round_trip(seed, **options)", seed=seed, options={**KINDS[name], "keys": 2}) is True


def test_pool_memory_is_pinned_in_steps_and_unpinned_at_the_end(pace, master, make_gpu_worker):
    worker = make_gpu_worker(master)
    worker(ROUND_TRIPS)
    got = worker(
        """
import time
from mooncake.transfer.cuda import pins as module
module.STEP = 5 << 20  # no multiple of anything
before = cuda.fake_pins()
assert round_trip(1, [32 << 10], 4, 8)
deadline = time.monotonic() + 20
while module.pins.pinned < 64 << 20:
    assert time.monotonic() < deadline, module.pins.pinned
    time.sleep(0.01)
steps = len(module.pins._bases)
assert all(round_trip(seed, [32 << 10, 300 << 10], 4, 40) for seed in range(2, 6))  # over the edges of steps
during = cuda.fake_pins()
store.close()
result = [before, during - cuda.fake_pins(), steps, module.pins.pinned, sound()]
"""
    )
    assert got == [0, 13, 13, 0, True]


def test_single_values(pace, master, make_gpu_worker):
    worker = make_gpu_worker(master)
    worker(
        """
size = 3 << 20
at, data = device_memory(size), noise(size)
fill(at, data)
assert store.put_from("plain", at, size) == 0
assert store.register_buffer(at, size) == 0
assert store.put_from("registered", at + 5, 1000) == 0
assert store.put_from_with_metadata("both", at + 64, at, 4096, 64) == 0
assert store.batch_put_from(["a", "b"], [at, at + 4096], [4096, 100]) == [0, 0]
assert [store.get(name) for name in ("plain", "registered", "both", "a", "b")] == [
    data, data[5:1005], data[: 4096 + 64], data[:4096], data[4096:4196]]
to = device_memory(size)
fill(to, bytes(size))
assert store.get_into("plain", to, size) == size and content(to, size) == data
fill(to, bytes(size))
assert store.batch_get_into(["registered", "b", "none"], [to, to + 2000, to], [1000, 100, 5]) == [1000, 100, -704]
assert content(to, 2100) == data[5:1005] + bytes(1000) + data[4096:4196]
assert store.register_buffer(to, size) == 0
fill(to, bytes(size))
got = store.get_into_ranges([to], [["plain"]], [[[0, 100]]], [[[10, 1 << 20]]], [[[50, 4096]]])
assert got == [[[50, 4096]]]
assert content(to, 4196) == data[10:60] + bytes(50) + data[1 << 20 : (1 << 20) + 4096]
assert store.register_buffer(to + 10, 10) == -600 and store.unregister_buffer(to) == 0
assert sound()
"""
    )


def test_host_and_device_pieces_of_one_value(pace, master, make_gpu_worker):
    worker = make_gpu_worker(master)
    worker(
        """
near, far, other = noise(50000, 1), noise(50000, 2), noise(50000, 3)
host = np.frombuffer(bytearray(near), np.uint8)
first, second = device_memory(50000, 0), device_memory(50000, 1)
fill(first, far); fill(second, other)
where = [[host.ctypes.data + 7, first, second + 100, first + 4000, host.ctypes.data]]
sizes = [[1000, 3000, 5000, 16, 7]]
assert store.batch_put_from_multi_buffers(["mixed"], where, sizes) == [0]
value = near[7:1007] + far[:3000] + other[100:5100] + far[4000:4016] + near[:7]
assert store.get("mixed") == value
fill(first, bytes(50000)); fill(second, bytes(50000)); host[:] = 0
assert store.batch_get_into_multi_buffers(["mixed"], where, sizes) == [len(value)]
assert host[7:1007].tobytes() == near[7:1007] and host[:7].tobytes() == near[:7]
assert content(first, 4016) == far[:3000] + bytes(1000) + far[4000:4016]
assert content(second, 5200) == bytes(100) + other[100:5100] + bytes(100)
assert sound()
"""
    )


def test_memory_that_is_not_there(pace, master, make_gpu_worker):
    """A kernel that touched it would end the engine's CUDA: it is refused before."""
    worker = make_gpu_worker(master)
    worker(
        """
size = 1 << 20
at, kept = device_memory(size), device_memory(size)
fill(at, noise(size)); fill(kept, noise(size, 1))
assert store.register_buffer(at, size) == 0 and store.register_buffer(kept, size) == 0
assert store.register_buffer(kept + size - 4096, 4096 * 2) == -600
assert store.put_from("over", kept + size - 4096, 8192) == -800
many = [[kept + i * 8192 for i in range(100)] + [kept + size - 100]]
assert store.batch_put_from_multi_buffers(["over"], many, [[4096] * 101]) == [-800]
cuda.fake_free(at)
assert store.put_from("freed", at, size) == -800
mixed = [[kept + i * 8192 for i in range(8)], [at + i * 8192 for i in range(8)]]
codes = store.batch_put_from_multi_buffers(["kept", "freed"], mixed, [[4096] * 8] * 2)
assert codes[1] == -800, codes
assert store.put_from("good", kept, size) == 0 and store.get("good") == noise(size, 1)
assert store.get_into("good", at, size) == -800
assert store.is_exist("freed") == 0 and store.is_exist("over") == 0
assert sound()
"""
    )


def test_many_threads(pace, master, make_gpu_worker):
    """More calls at once than there are lanes."""
    worker = make_gpu_worker(master, segment=256 * MIB)
    worker(
        """
import threading
size, block = 4 << 20, 32 << 10
failures = []
def work(number):
    try:
        at, data = device_memory(size, number % 2), noise(size, number)
        fill(at, data)
        for turn in range(6):
            order = random.Random(number * 100 + turn).sample(range(size // block), 64)
            where = [[at + i * block for i in order]]
            assert store.batch_put_from_multi_buffers([f"{number}-{turn}"], where, [[block] * 64]) == [0]
            fill(at, bytes(size))
            assert store.batch_get_into_multi_buffers([f"{number}-{turn}"], where, [[block] * 64]) == [64 * block]
            wanted = bytearray(size)
            for i in order:
                wanted[i * block : (i + 1) * block] = data[i * block : (i + 1) * block]
            assert content(at, size) == bytes(wanted)
            fill(at, data)
    except BaseException as error:
        failures.append(repr(error))
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failures, failures
"""
    )


def test_a_process_without_device_memory_never_loads_the_driver(make_worker):
    worker = make_worker(segment=16 * MIB)
    assert worker(
        """
import os
room = bytearray(b"x" * 5000)
import numpy as np
at = np.frombuffer(room, np.uint8).ctypes.data
assert store.register_buffer(at, 5000) == 0
assert store.put_from("a", at, 5000) == 0 and store.get_into("a", at, 5000) == 5000
result = "libcuda" not in open("/proc/self/maps").read()
"""
    )


def test_a_batch_in_overlapping_parts(pace, master, make_gpu_worker):
    """Large batches are cut, and one part is copied while the next is asked for: the results are those of one batch."""
    worker = make_gpu_worker(master, segment=128 * MIB)
    worker(ROUND_TRIPS)
    worker(
        """
from mooncake.store import vectors
vectors.LISTS = vectors.Cutting(300 << 10, 1.0, 300 << 10, 1 << 62)
assert all(round_trip(seed, [32 << 10, 4096], 40, 16) for seed in range(3))
assert round_trip(9, [1, 17, 70001], 30, 8)
size, block = 8 << 20, 32 << 10
at, data = device_memory(size), noise(size)
fill(at, data)
gone = device_memory(size)
cuda.fake_free(gone)
n = 64
keys = [f"part-{i}" for i in range(n)]
where = [[at + i * 4 * block, at + (i * 4 + 2) * block] for i in range(n)]
sizes = [[block, block] for _ in range(n)]
where[20] = [0, at]          # unsound: refused, the others are stored
where[50] = [gone, gone + block]
sizes[30] = [block]          # lengths that do not match
config = ReplicateConfig()
config.group_ids = [f"group-{i}" for i in range(n)]
assert store.put_from("part-3", at, 100) == 0
codes = store.batch_put_from_multi_buffers(keys, where, sizes, config)
assert [codes[i] for i in (20, 30)] == [-600, -600]
assert codes[50] == -800
lost = {i for i, code in enumerate(codes) if code}
assert {20, 30, 50} <= lost and len(lost) < 2 + 16, lost  # those that share a copy with 50, no other part's
for i in range(n):
    if i in lost:
        assert store.is_exist(keys[i]) == 0
    elif i != 3:
        assert store.get(keys[i]) == data[i * 4 * block :][:block] + data[(i * 4 + 2) * block :][:block]
assert store.get("part-3") == data[:100]
to = device_memory(size)
fill(to, bytes(size))
back = [[to + i * 4 * block, to + (i * 4 + 2) * block] for i in range(n)]
got = store.batch_get_into_multi_buffers(keys, back, [[block, block]] * n)
assert [got[i] for i in range(n) if i not in lost and i != 3] == [2 * block] * (n - len(lost) - 1)
assert got[3] < 0 and all(got[i] == -704 for i in lost)
whole = content(to, size)
for i in range(n):
    if i not in lost and i != 3:
        assert whole[i * 4 * block :][:block] == data[i * 4 * block :][:block]
assert sound()
"""
    )


def test_pieces_that_go_by_themselves_after_others(pace, master, make_gpu_worker):
    """A value whose device memory comes in two stretches, the first gathered, the second crossing by itself: the call
    returns when both are there."""
    worker = make_gpu_worker(master)
    worker(
        """
import time
from mooncake.transfer.cuda.pins import pins
size, block = 4 << 20, 32 << 10
at, data = device_memory(size), noise(size)
fill(at, data)
host = np.frombuffer(bytearray(b"h" * 10), np.uint8)
where = [[at + i * 2 * block for i in range(32)] + [host.ctypes.data] + [at + (3 << 20)]]
sizes = [[block] * 32 + [10] + [block]]
value = b"".join(data[i * 2 * block :][:block] for i in range(32)) + b"h" * 10 + data[3 << 20 :][:block]
assert store.put_from("first", at, block) == 0
deadline = time.monotonic() + 20
while pins.pinned < 64 << 20:
    assert time.monotonic() < deadline, pins.pinned
    time.sleep(0.01)
for turn in range(3):
    assert store.batch_put_from_multi_buffers([f"k{turn}"], where, sizes) == [0]
    assert store.get(f"k{turn}") == value
    fill(at, bytes(size))
    assert store.batch_get_into_multi_buffers([f"k{turn}"], where, sizes) == [len(value)]
    got = content(at, size)
    assert b"".join(got[i * 2 * block :][:block] for i in range(32)) == value[: 32 * block]
    assert got[3 << 20 :][:block] == data[3 << 20 :][:block]
    fill(at, data)
assert sound()
"""
    )


BLOCKS = """
from mooncake.transfer.blocks import BlockShape, BlockVector

def blocks_round_trip(seed, count, pieces, size, grain, allocations=1, gpu=0):
    "Blocks of several layers, each with its own size and stride, to the pool and back to other places."
    rng = random.Random(seed)
    sizes = [rng.randrange(1, size // grain + 1) * grain for _ in range(pieces)]
    strides = [n + rng.choice([0, 0, grain, 3 * grain]) for n in sizes]
    rooms = [sum(strides[a::allocations]) * count * 2 + 4096 for a in range(allocations)]
    memory = [device_memory(room, gpu) for room in rooms]
    kept = [noise(room, seed * 10 + a) for a, room in enumerate(rooms)]
    for at, data in zip(memory, kept):
        fill(at, data)
    ends, bases = [0] * allocations, []
    for p in range(pieces):
        bases.append(memory[p % allocations] + ends[p % allocations])
        ends[p % allocations] += strides[p] * count * 2
    shape = BlockShape(bases, strides, sizes)
    order = rng.sample(range(2 * count), 2 * count)
    sources, targets = order[:count], order[count:]
    keys = [f"blocks-{seed}-{i}" for i in range(count)]
    codes = store.put_from_blocks(keys, BlockVector(shape, sources))
    assert codes == [0] * count, codes

    def value(block):
        parts = []
        for p in range(pieces):
            at = bases[p] - memory[p % allocations] + block * strides[p]
            parts.append(kept[p % allocations][at : at + sizes[p]])
        return b"".join(parts)

    for i in rng.sample(range(count), min(count, 5)):
        assert store.get(keys[i]) == value(sources[i])
    asked = keys + ["none"]
    assert store.get_into_blocks(asked, BlockVector(shape, targets + sources[:1])) == [0] * count + [-704]
    wanted = [bytearray(data) for data in kept]
    for source, target in zip(sources, targets):
        for p in range(pieces):
            at, to = (bases[p] - memory[p % allocations] + block * strides[p] for block in (source, target))
            wanted[p % allocations][to : to + sizes[p]] = kept[p % allocations][at : at + sizes[p]]
    for at, data in zip(memory, wanted):
        assert content(at, len(data)) == bytes(data), "other bytes than were put"
        cuda.fake_free(at)
    store.remove_all(True)
    return sound()
"""

SHAPES = {
    "as engines' blocks lie": {"count": 40, "pieces": 8, "size": 64 << 10, "grain": 4096},
    "each layer an allocation": {"count": 20, "pieces": 6, "size": 32 << 10, "grain": 512, "allocations": 6},
    "odd": {"count": 30, "pieces": 5, "size": 7001, "grain": 1},
    "larger than a lane": {"count": 3, "pieces": 40, "size": 400 << 10, "grain": 16},
    "pieces that cross by themselves": {"count": 2, "pieces": 2, "size": 2 << 20, "grain": 1 << 20},
    "one": {"count": 1, "pieces": 1, "size": 64, "grain": 16},
    "second GPU": {"count": 9, "pieces": 3, "size": 8192, "grain": 32, "gpu": 1},
}


@pytest.mark.parametrize("way", ["own segment", "other segment", "tcp"])
@pytest.mark.parametrize("part", [1 << 20, None])
def test_blocks_come_back(way, part, pace, master, make_gpu_worker, make_worker, monkeypatch):
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    if way != "own segment":
        make_worker(segment=128 * MIB)
    if way == "tcp":
        monkeypatch.setenv("MC_FORCE_TCP", "1")
    worker = make_gpu_worker(master, segment=128 * MIB if way == "own segment" else 0)
    worker(BLOCKS)
    if part:
        worker("from mooncake.store import blocks\nblocks.CUTTING = blocks.Cutting(part, 1.0, part, 7)", part=part)
    for seed, options in enumerate(SHAPES.values()):
        assert worker("result = blocks_round_trip(seed, **options)", seed=seed, options=options) is True


@pytest.mark.parametrize(
    "lack",
    [
        {"FAKE_CUDA_NO_PINS": 1},
        {"FAKE_CUDA_MEMORY": 60 << 20},
        {"MC_STORE_PIN_MEMORY_MAX_BYTES": 0},
        {"FAKE_CUDA_MEMORY": 60 << 20, "MC_STORE_PIN_MEMORY_MAX_BYTES": 0},
    ],
)
def test_blocks_where_the_machine_lacks_something(lack, pace, master, make_gpu_worker):
    worker = make_gpu_worker(master, **lack)
    worker(BLOCKS)
    if "FAKE_CUDA_MEMORY" in lack:
        worker("hog = device_memory(40 << 20)")
    for seed, name in enumerate(("odd", "as engines' blocks lie")):
        options = {**SHAPES[name], "count": 6}
        assert worker("result = blocks_round_trip(seed, **options)", seed=seed, options=options) is True


def test_blocks_of_another_size_or_in_memory_that_is_gone(pace, master, make_gpu_worker):
    worker = make_gpu_worker(master)
    worker(BLOCKS)
    worker(
        """
at, gone = device_memory(1 << 20), device_memory(1 << 20)
fill(at, noise(1 << 20))
small, large = BlockShape([at], [4096], [4096]), BlockShape([at], [8192], [8192])
assert store.put_from_blocks(["a", "b"], BlockVector(small, [0, 1])) == [0, 0]
assert store.put_from_blocks(["a", "c"], BlockVector(small, [2, 2])) == [0, 0]
assert store.get("a") == noise(1 << 20)[:4096]  # it was there already
codes = store.get_into_blocks(["a", "none", "b"], BlockVector(large, [3, 4, 5]))
assert codes[1] == -704 and codes[0] < 0 and codes[2] < 0, codes
cuda.fake_free(gone)
assert store.put_from_blocks(["d"], BlockVector(BlockShape([gone], [4096], [4096]), [1])) == [-800]
assert store.get_into_blocks(["a"], BlockVector(BlockShape([gone], [4096], [4096]), [1])) == [-800]
over = BlockVector(BlockShape([at], [4096], [4096]), [1, 255, 256])
assert store.put_from_blocks(["e", "f", "g"], over) == [-800] * 3
assert store.is_exist("d") == 0 and store.is_exist("e") == 0
assert content(at, 1 << 20) == noise(1 << 20) and sound()
"""
    )
