"""Bytes between two real processes: which transport carries them, every shape of batch, hashes on both sides."""

import hashlib
import random
import threading

import numpy as np
import pytest

from mooncake.engine import TransferNotify, TransferOpcode
from tests.engine.conftest import MIB, Side, Target

DIGEST = "import hashlib; result = hashlib.blake2b(memory[start:end].tobytes()).hexdigest()"


def digest(data) -> str:
    return hashlib.blake2b(data.tobytes()).hexdigest()


SIZE = 16 * MIB
RANDOM = np.frombuffer(np.random.default_rng(1).bytes(SIZE), np.uint8)


@pytest.fixture(scope="module", params=["cma", "tcp"])
def processes(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_FORCE_TCP", str(int(request.param == "tcp")))
        side, target = Side(SIZE), Target(SIZE)
    yield side, target, request.param
    side.engine._leave()
    target.close()


@pytest.fixture
def pair(processes):
    side, target, _ = processes
    side.memory[:] = RANDOM
    target("memory[:] = 0")
    return side, target


def test_the_transport_is_the_expected_one(processes):
    side, target, transport = processes
    assert side.engine.transfer_sync_write(target.session, side.base, target.base, 1000) == 0
    moved = side.engine.transfer_stats()
    assert moved.pop(transport) == 1000
    assert set(moved.values()) == {0}


@pytest.mark.parametrize(
    ("count", "size"), [(1, 1), (1, SIZE), (3, 777), (128, 65536), (2048, 4096), (4095, 4096), (10_000, 1000), (9, MIB)]
)
def test_scattered_blocks(pair, count, size):
    side, target = pair
    places = range(SIZE // size)
    here, there = (random.Random(seed).sample(places, count) for seed in (1, 2))
    local = [side.base + at * size for at in here]
    remote = [target.base + at * size for at in there]
    lengths = [size] * count
    assert side.engine.batch_transfer_sync_write(target.session, local, remote, lengths) == 0
    order = "import hashlib; h = hashlib.blake2b(); [h.update(memory[a:a + size]) for a in at]; result = h.hexdigest()"
    expected = hashlib.blake2b()
    for at in here:
        expected.update(side.memory[at * size : (at + 1) * size])
    assert target(order, at=[at * size for at in there], size=size) == expected.hexdigest()
    target("memory[:] = np.frombuffer(np.random.default_rng(5).bytes(size), np.uint8)", size=SIZE)
    before = side.memory.copy()
    assert side.engine.batch_transfer_sync_read(target.session, local, remote, lengths) == 0
    source = np.frombuffer(np.random.default_rng(5).bytes(SIZE), np.uint8)
    for a, b in zip(here, there, strict=True):
        before[a * size : (a + 1) * size] = source[b * size : (b + 1) * size]
    assert (before == side.memory).all()  # and nothing else was touched


@pytest.mark.parametrize("seed", range(3))
def test_ragged_pieces(pair, seed):
    """Lengths from 1 byte to megabytes, unaligned, some adjoining on both sides, some empty, in any order."""
    side, target = pair
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 7, 100, 4096, 5000, 65536, 600_000]) for _ in range(59)] + [3 * MIB]
    starts_here, starts_there, at, to = [], [], 3, 11
    for length in lengths:
        gap = rng.choice([0, 0, 1, 13, 4096])
        starts_here.append(at)
        starts_there.append(to)
        at += length + gap
        to += length + rng.choice([gap, gap, 0])
    assert max(at, to) < SIZE
    order = rng.sample(range(60), 60) if seed else range(60)
    local = [side.base + starts_here[i] for i in order]
    remote = [target.base + starts_there[i] for i in order]
    assert side.engine.batch_transfer_sync_write(target.session, local, remote, [lengths[i] for i in order]) == 0
    expected = np.zeros(SIZE, np.uint8)
    for here, there, length in zip(starts_here, starts_there, lengths, strict=True):
        expected[there : there + length] = side.memory[here : here + length]
    assert target(DIGEST, start=0, end=SIZE) == digest(expected)
    side.memory[:] = 0
    assert side.engine.batch_transfer_sync_read(target.session, local, remote, [lengths[i] for i in order]) == 0
    for here, there, length in zip(starts_here, starts_there, lengths, strict=True):
        assert (side.memory[here : here + length] == expected[there : there + length]).all()


def test_many_threads_with_mixed_sizes(pair):
    """Descriptors of 16 KiB and 2.4 MB at once (U061): every one arrives as it was sent, and comes back so."""
    side, target = pair
    places, at = [], 0
    while at < 15 * MIB:
        length = 16384 if len(places) % 3 else 2_400_000
        places.append((at, min(length, 15 * MIB - at)))
        at += length
    failures = []

    def work(mine):
        for _ in range(3):
            local = [side.base + at for at, _ in mine]
            remote = [target.base + at for at, _ in mine]
            lengths = [length for _, length in mine]
            codes = [
                side.engine.batch_transfer_sync_write(target.session, local, remote, lengths),
                side.engine.batch_transfer_sync_read(target.session, local, remote, lengths),
            ]
            if any(codes):
                failures.append(codes)

    before = digest(side.memory[: 15 * MIB])
    threads = [threading.Thread(target=work, args=(places[i::16],)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert digest(side.memory[: 15 * MIB]) == before
    assert target(DIGEST, start=0, end=15 * MIB) == before
    assert target("import os; result = len(os.listdir('/proc/self/fd'))") < 64  # streams are bounded


def test_notification_comes_after_the_data(pair):
    side, target = pair
    side.memory[:MIB] = 9
    target.send("""
import time
while not (got := engine.get_notifies()):
    time.sleep(0.0005)
result = [int(memory[:1 << 20].min()), got[0].name, got[0].msg]
""")
    note = TransferNotify("request-1", "done")
    assert side.engine.transfer_sync(target.session, side.base, target.base, MIB, TransferOpcode.Write, note) == 0
    assert target.receive() == [9, "request-1", "done"]


def test_both_ways_at_once(pair):
    side, target = pair
    target.send(
        "result = [engine.transfer_sync_write(session, base, where, 8 << 20) for _ in range(5)]",
        session=side.session,
        where=side.base + 8 * MIB,
    )
    for _ in range(5):
        assert side.engine.transfer_sync_write(target.session, side.base, target.base + 8 * MIB, 8 * MIB) == 0
    assert target.receive() == [0] * 5


def test_a_target_whose_interpreter_is_busy(make_side, make_target, monkeypatch):
    """cma needs nothing of the target's interpreter, not even after it has registered other memory."""
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    side, target = make_side(), make_target()
    assert side.engine.transfer_sync_write(target.session, side.base, target.base, 8) == 0
    more = target("""
other = np.zeros(1 << 20, np.uint8)
assert engine.register_memory(other.ctypes.data, 1 << 20) == 0
result = other.ctypes.data
""")
    target.send("""
import ctypes
ctypes.PyDLL(None).usleep(800_000)  # PyDLL: with the interpreter lock held
""")
    threading.Event().wait(0.2)
    side.memory[:] = 3
    assert side.engine.transfer_sync_write(target.session, side.base, more, MIB) == 0
    assert side.engine.transfer_sync_read(target.session, side.base, more, MIB) == 0
    assert not target.has_answered()
    target.receive()
    assert target("result = int(other.min())") == 3
