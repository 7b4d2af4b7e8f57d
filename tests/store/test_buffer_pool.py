"""BufferPool: sizes, exhaustion, views, and that its memory is registered."""

import gc
import threading
import time

import numpy as np
import pytest

import mooncake
import mooncake.buffer_pool
import mooncake.store
from mooncake.store import BufferPool, MooncakeDistributedStore

MIB = 1 << 20


@pytest.fixture
def store(make_store):
    return make_store(segment=64 * MIB, buffer=8 * MIB)


def test_names():
    assert mooncake.BufferPool is mooncake.RegisteredBufferPool is mooncake.buffer_pool.BufferPool is BufferPool
    for name in ("RegisteredBufferPool", "BufferLease", "RegisteredBufferLease", "BufferLeaseView"):
        assert hasattr(mooncake.store, name)


def test_a_lease(store):
    pool = BufferPool(store)
    lease = pool.acquire(1000)
    assert (lease.size, lease.ptr % (8 * MIB)) == (1000, 0)
    view = lease.buffer
    assert (type(view), view.nbytes, view.readonly, view.ndim, view.format) == (memoryview, 1000, False, 1, "B")
    view[:5] = b"hello"
    assert store.register_buffer(lease.ptr, 10) == -600  # it is registered
    assert store.put_from("k", lease.ptr, 5) == 0
    assert store.get("k") == b"hello"
    with pytest.raises(RuntimeError, match="views exist"):
        lease.release()
    kept = np.frombuffer(view, np.uint8)
    del view
    with pytest.raises(RuntimeError, match="views exist"):
        lease.release()
    del kept
    lease.release()
    lease.release()
    assert lease.size == 1000
    for gone in (lambda: lease.ptr, lambda: lease.buffer):
        with pytest.raises(RuntimeError, match="closed"):
            gone()


def test_memory_is_used_again(store):
    pool = BufferPool(store, alignment=4096)
    with pool.acquire(100_000) as lease:
        address = lease.ptr
    with pool.buffer(70_000) as lease:
        assert lease.ptr == address
    forgotten = pool.acquire(70_000)
    assert forgotten.ptr == address
    del forgotten
    gc.collect()
    assert pool.acquire(70_000).ptr == address
    pool.close()
    pool.close()
    assert store.unregister_buffer(address) == -600
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire(1)
    with pytest.raises(RuntimeError, match="closed"):
        pool.prewarm(1, 1)


def test_exhaustion(store):
    pool = BufferPool(store, max_bytes=8 * MIB)  # and the local buffer's 8 MiB
    with pytest.raises(RuntimeError, match="exceeds pool capacity"):
        pool.acquire(9 * MIB)
    first, second = pool.acquire(8 * MIB), pool.acquire(8 * MIB)
    started = time.monotonic()
    for arguments in ((False,), (True, 0.2), (None, 0)):
        with pytest.raises(RuntimeError, match="exhausted"):
            pool.acquire(8 * MIB, *arguments)
    assert time.monotonic() - started >= 0.2
    with pytest.raises(RuntimeError, match="non-negative"):
        pool.acquire(1, None, -1)
    with pytest.raises(RuntimeError, match="active leases"):
        pool.close()
    timer = threading.Timer(0.2, first.release)
    timer.start()
    third = pool.acquire(8 * MIB, True, 60)
    timer.join()
    third.release()
    second.release()
    small = pool.acquire(100)  # what is kept makes room for other sizes
    small.release()
    pool.close()
    waiting = BufferPool(store, max_bytes=1, block_on_exhaustion=False, max_regions=1)
    lease = waiting.acquire(10)
    with pytest.raises(RuntimeError, match="exhausted"):
        waiting.acquire(10)
    lease.release()


def test_size_classes_and_prewarming(store):
    pool = BufferPool(store, max_size_class=MIB, alignment=4096, prewarm_size=3 * MIB, prewarm_count=2)
    pool.prewarm(1000, 2)
    pool.prewarm(0, 1)
    pool.prewarm(1000, 0)
    leases = [pool.acquire(3 * MIB) for _ in range(2)] + [pool.acquire(5 * MIB), pool.acquire(0)]
    assert len({lease.ptr for lease in leases}) == 4
    for lease in leases:
        lease.release()
    pool.close()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"max_bytes": -1}, TypeError),
        ({"min_size_class": 0}, RuntimeError),
        ({"alignment": 0}, RuntimeError),
        ({"alignment": 100}, RuntimeError),
        ({"prewarm_count": -1}, TypeError),
    ],
)
def test_what_is_refused(store, settings, error):
    with pytest.raises(error):
        BufferPool(store, **settings)
    with pytest.raises(TypeError):
        BufferPool(store).acquire(-1)


def test_stores_that_cannot(make_store):
    for bad in (None, 3, MooncakeDistributedStore()):
        with pytest.raises(RuntimeError):
            BufferPool(bad)
    with pytest.raises(RuntimeError, match="local buffer"):
        BufferPool(make_store(buffer=0))


def test_many_threads(store):
    pool = BufferPool(store, max_bytes=MIB, min_size_class=4096, alignment=4096)
    failures = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for i in range(200):
            with pool.acquire(int(rng.integers(1, 4 * MIB)), True, 60) as lease:
                mark = bytes([number]) * 16
                size = min(16, lease.size)
                lease.buffer[:size] = mark[:size]
                if bytes(lease.buffer[:size]) != mark[:size]:
                    failures.append(i)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    pool.close()
