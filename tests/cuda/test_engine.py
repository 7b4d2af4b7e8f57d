"""The transfer engine between device and host memory of two processes, on a stand-in for the CUDA driver."""

import time

import pytest

from tests.engine.conftest import Target
from tests.processes import gone, wait_until

ENGINE = """
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
size = 10 << 20
gpu = device_memory(size, 0)
other = device_memory(size, 1)
host = np.zeros(size, np.uint8)
spare = np.zeros(size, np.uint8)  # not registered
places = {"gpu": gpu, "other": other, "host": host.ctypes.data, "spare": spare.ctypes.data}
assert engine.batch_register_memory([gpu, other, host.ctypes.data], [size] * 3) == 0

def set_bytes(name, data):
    if name in ("gpu", "other"):
        fill(places[name], data)
    else:
        (host if name == "host" else spare)[: len(data)] = np.frombuffer(data, np.uint8)

def get_bytes(name, length=size):
    if name in ("gpu", "other"):
        return content(places[name], length)
    return (host if name == "host" else spare)[:length].tobytes()

def digest(data):
    import hashlib
    return hashlib.sha256(data).hexdigest()

result = [f"127.0.0.1:{engine.get_rpc_port()}", places]
"""

MOVES = """
def scattered(seed, count, sizes):
    rng = random.Random(seed)
    pieces, at = [], 0
    for _ in range(count):
        length = rng.choice(sizes)
        pieces.append((at, length))
        at += length + rng.choice([0, 0, 64])
    rng.shuffle(pieces)
    return pieces

def move(write, mine, their_address, session, seed, sizes, count, their_data_seed):
    "Bytes as they must be at both ends: mine, theirs (digests)."
    ours, theirs = noise(size, seed), noise(size, their_data_seed)
    set_bytes(mine, ours)
    near, far = scattered(seed, count, sizes), scattered(seed + 1, count, sizes)
    far = [(at, near[i][1]) for i, (at, _) in enumerate(far)]
    lengths = [length for _, length in near]
    if len(set(sizes)) > 1:  # the far ends must not overlap either
        at, far = 0, []
        for length in lengths:
            far.append((at, length)); at += length + 32
    call = engine.batch_transfer_sync_write if write else engine.batch_transfer_sync_read
    code = call(session, [places[mine] + at for at, _ in near], [their_address + at for at, _ in far], lengths)
    assert code == 0, code
    wanted = bytearray(theirs if write else ours)
    for (a, length), (b, _) in zip(near, far):
        if write:
            wanted[b : b + length] = ours[a : a + length]
        else:
            wanted[a : a + length] = theirs[b : b + length]
    if not write:
        assert get_bytes(mine) == bytes(wanted)
        return [digest(wanted), digest(theirs), sound()]
    assert get_bytes(mine) == ours
    return [digest(ours), digest(wanted), sound()]
"""

ENDS = [(mine, theirs) for mine in ("gpu", "host", "spare") for theirs in ("gpu", "other", "host")]


@pytest.fixture
def make_end(make_gpu_worker, monkeypatch):
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)

    def make(**environment):
        worker = make_gpu_worker(**environment)
        worker.session, worker.places = worker(ENGINE)
        worker(MOVES)
        return worker

    return make


@pytest.mark.parametrize("way", ["cuda", "tcp", "no ipc"])
def test_every_pair_of_ends(way, pace, make_end):
    environment = {"tcp": {"MC_FORCE_TCP": 1}, "no ipc": {"FAKE_CUDA_NO_IPC": 1}}.get(way, {})
    side, target = make_end(**environment), make_end(**environment)
    shapes = [([32 << 10], 100), ([16, 4096, 48 << 10], 60), ([1, 333, 70001], 60), ([2 << 20], 4), ([9 << 20], 1)]
    for number, (mine, theirs) in enumerate(ENDS):
        for write in (True, False):
            sizes, count = shapes[(number + write) % len(shapes)]
            target(f"set_bytes('{theirs}', noise(size, 77))")
            _, wanted, sound = side(
                "result = move(write, mine, their_address, session, seed, sizes, count, 77)",
                write=write,
                mine=mine,
                their_address=target.places[theirs],
                session=target.session,
                seed=number * 10,
                sizes=sizes,
                count=count,
            )
            assert target(f"result = digest(get_bytes('{theirs}'))") == wanted, (mine, theirs, write, sizes)
            assert sound
    stats = side("result = engine.transfer_stats()")
    if way == "cuda":
        assert stats["tcp"] == 0
        assert min(stats["cuda"], stats["cma"]) > 0
    elif way == "tcp":
        assert stats["cma"] == 0
        assert "cuda" not in stats
    else:
        assert min(stats["cuda"], stats["cma"], stats["tcp"]) > 0
    assert target("result = sound()")


def test_a_process_that_has_no_gpu(pace, make_end, cleanup):
    """It reaches a peer's device memory by tcp, and is reached by it."""
    plain, target = Target(8 << 20), make_end()
    cleanup.callback(plain.close)
    target("set_bytes('gpu', noise(size, 5))")
    code = plain(
        "result = engine.transfer_sync_read(session, base, there, 1 << 20)",
        session=target.session,
        there=target.places["gpu"],
    )
    assert code == 0
    assert plain("import hashlib; result = hashlib.sha256(memory[: 1 << 20]).hexdigest()") == target(
        "result = digest(noise(size, 5)[: 1 << 20])"
    )
    assert plain("result = 'libcuda' in open('/proc/self/maps').read()") is False
    assert (
        target(
            "result = engine.transfer_sync_write(session, gpu + 100, there, 5000)",
            session=plain.session,
            there=plain.base,
        )
        == 0
    )
    assert plain("result = hashlib.sha256(memory[:5000]).hexdigest()") == target(
        "result = digest(noise(size, 5)[100:5100])"
    )


def test_to_oneself(pace, make_end):
    side = make_end()
    for theirs in ("gpu", "other", "host"):
        side(f"set_bytes('{theirs}', noise(size, 9))")
        side(
            """
set_bytes("spare", noise(size, 10))
assert engine.transfer_sync_write(session, spare.ctypes.data, there, 100001) == 0
""",
            session=side.session,
            there=side.places[theirs],
        )
        assert side(f"result = get_bytes('{theirs}', 100001) == noise(size, 10)[:100001]")


def test_memory_is_registered_anew(pace, make_end):
    """Freed, and other memory registered in its place: the peer's mapping of the former is not used for it."""
    side, target = make_end(), make_end()
    for turn in range(4):
        there = target(
            """
block = device_memory(1 << 20)
fill(block, noise(1 << 20, turn))
assert engine.register_memory(block, 1 << 20) == 0
result = block
""",
            turn=turn,
        )
        side(
            """
assert engine.transfer_sync_read(session, gpu, there, 1 << 20) == 0
assert content(gpu, 1 << 20) == noise(1 << 20, turn)
""",
            session=target.session,
            there=there,
            turn=turn,
        )
        target("assert engine.unregister_memory(block) == 0; cuda.fake_free(block)")
        assert (
            side("result = engine.transfer_sync_read(session, gpu, there, 4096)", session=target.session, there=there)
            == -1
        )
    assert side("result = sound()")


def test_what_cannot_be(pace, make_end):
    side, target = make_end(), make_end()
    refused = side(
        """
a, b = places["gpu"], places["host"]
free = device_memory(8192)
result = [
    engine.register_memory(a + 10, 10), engine.register_memory(free, 3 * 8192), engine.register_memory(12345, 10),
    engine.transfer_sync_write(session, a, there + size - 10, 20),
    engine.transfer_sync_write(session, a + size - 10, there, 20),
    engine.transfer_sync_write(session, free, there, 8192),
    engine.unregister_memory(a), engine.unregister_memory(a), engine.register_memory(a, size),
    sound(),
]
""",
        session=target.session,
        there=target.places["gpu"],
    )
    assert refused == [-7, -1, -1, -1, -1, 0, 0, -3, 0, True]


def test_the_owner_is_killed_and_comes_back(pace, make_end):
    side, target = make_end(), make_end()
    read = "result = engine.transfer_sync_read(session, gpu, there, 1 << 20)"
    where = {"session": target.session, "there": target.places["gpu"]}
    assert side(read, **where) == 0
    target.kill()
    wait_until(lambda: gone(target.pid))
    started = time.monotonic()
    assert side(read, **where) == -1
    assert time.monotonic() - started < 6
    fresh = make_end()
    fresh("set_bytes('gpu', noise(size, 3))")
    assert side(read, session=fresh.session, there=fresh.places["gpu"]) == 0
    assert side("result = content(gpu, 1 << 20) == noise(1 << 20, 3)")
    assert side("result = sound()")


def test_a_link_that_ends_just_before_it_is_used(pace, make_end):
    """Whoever held it asks again; nothing of the ended one is left for the next transfers."""
    side, target = make_end(), make_end()
    side(
        """
assert engine.transfer_sync_read(session, gpu, there, 4096) == 0
(peer,) = engine._engine._peers.values()
from mooncake.transfer.cma import NotBegunError
from mooncake.transfer.pieces import pieces_of
for _ in range(3):
    former = peer.open()
    peer._drop_link()
    try:
        peer._move_here(former, False, pieces_of([gpu], [64]), pieces_of([there], [64]), 1e18)
    except NotBegunError:
        pass
    else:
        raise AssertionError("it was used after its end")
    assert engine.transfer_sync_read(session, gpu, there, 4096) == 0
assert engine.transfer_stats()["cuda"] == 4 * 4096
assert sound()
""",
        session=target.session,
        there=target.places["gpu"],
    )
