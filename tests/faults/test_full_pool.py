"""A pool that is full: every byte is used, and what must stay stays."""

import random
import threading
import time

import pytest

from mooncake.store import ReplicateConfig
from tests.faults.test_kills import used
from tests.faults.test_recovery import config
from tests.processes import wait_until

pytestmark = pytest.mark.slow

MIB = 1 << 20
GRANULE = 256


def rounded(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


@pytest.mark.parametrize("segments", [(4 * MIB,), (2 * MIB, 3 * MIB + 1024 + 77, MIB)], ids=["one", "three"])
def test_every_granule_can_be_filled(make_master, make_store, segments):
    """With values of odd sizes that may not be evicted, after holes were torn into it."""
    master = make_master("--default_kv_lease_ttl=200")
    store, *_ = [make_store(size, at=master) for size in segments]
    capacity = sum(size // GRANULE * GRANULE for size in segments)
    rng = random.Random(1)
    pinned = config(with_hard_pin=True)
    stored: dict[str, bytes] = {}

    def fill(sizes: tuple[int, ...], tag: str) -> None:
        full = False
        while not full and used(master) < capacity:
            size = rng.choice(sizes) + rng.randrange(200)
            left = capacity - int(used(master))
            key = f"{tag}{len(stored)}"
            value = rng.randbytes(size)
            code = store.put(key, value, pinned)
            assert code in (0, -200)
            assert (code == 0) == (rounded(size) <= left), (size, left)
            if code:
                full = True
            else:
                stored[key] = value

    fill((100_000, 300_000, 1_700_000), "a")
    for key in rng.sample(sorted(stored), len(stored) // 2):
        assert store.remove(key, force=True) == 0
        del stored[key]
    time.sleep(0.1)
    fill((200_000, 50_000, 3_000), "b")
    rest = capacity - int(used(master))
    if rest:
        assert store.put("last", b"l" * rest, pinned) == 0  # in as many pieces as it takes
        stored["last"] = b"l" * rest
    assert used(master) == capacity
    assert store.put("more", b"m", pinned) == -200
    for key, value in stored.items():
        assert store.get(key) == value
    for key in stored:
        assert store.remove(key, force=True) == 0
    wait_until(lambda: used(master) == 0, 3)


CHURN = """
import threading, time
from mooncake.store import ReplicateConfig
codes = {}
wrong = []
def run(t):
    rounds = 0
    while rounds < count:
        key = f'{name}-{t}-{rounds}'
        size = (rounds * 7919 + t * 104729) % 180_000 + 1000
        value = (key.encode() * (size // len(key) + 1))[:size]
        code = store.put(key, value)
        codes[code] = codes.get(code, 0) + 1
        got = store.get(f'{name}-{t}-{rounds - 5}')
        if got and not got.startswith(f'{name}-{t}-{rounds - 5}'.encode()):
            wrong.append(key)
        rounds += 1
threads = [threading.Thread(target=run, args=(t,)) for t in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
result = [codes, wrong]
"""


def test_churn_of_many_writers_beside_probes(make_master, make_store, make_worker):
    """Three times the pool from 16 threads in 4 processes, everything read and probed: no failed put; hard pins stay;
    groups go as a whole."""
    master = make_master("--default_kv_lease_ttl=3000")
    store = make_store(24 * MIB, at=master)
    make_worker(8 * MIB, at=master)
    assert store.put("pinned", b"p" * MIB, config(with_hard_pin=True)) == 0
    groups: list[list[str]] = []
    for g in range(40):
        keys = [f"g{g}-{i}" for i in range(8)]
        options = ReplicateConfig()
        options.group_ids = [f"g{g}"] * 8
        assert store.put_batch(keys, [b"g" * 20_000] * 8, options) == 0
        groups.append(keys)
    workers = [make_worker(at=master) for _ in range(4)]
    stop = threading.Event()
    halves = []

    def probe() -> None:
        everything = [key for keys in groups for key in keys]
        while not stop.is_set():
            found = store.batch_is_exist(everything)
            for g in range(len(groups)):
                some = found[g * 8 : g * 8 + 8]
                if some not in ([1] * 8, [0] * 8) and min(some) >= 0:
                    halves.append(some)

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        for n, worker in enumerate(workers):
            worker.send(CHURN, name=f"w{n}", count=70)
        results = [worker.receive() for worker in workers]
    finally:
        stop.set()
        prober.join()
    for codes, wrong in results:
        assert list(codes) == ["0"], codes
        assert not wrong
    assert not halves
    assert store.get("pinned") == b"p" * MIB
