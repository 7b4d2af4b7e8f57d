"""A segment server that is there and says nothing costs one bounded wait, not one a key, and nobody else's time."""

import os
import signal
import threading
import time

import pytest

from tests.faults.test_kills import timed
from tests.processes import children, stop, wait_until

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.mark.parametrize(("force_tcp", "limit"), [("", 1.5), ("1", 2.6)], ids=["shm", "tcp"])
def test_before_it_was_ever_reached(make_worker, make_store, monkeypatch, force_tcp, limit):
    monkeypatch.setenv("MC_FORCE_TCP", force_tcp)
    silent = make_worker(16 * MIB)
    assert silent("result = [store.put(f's{i}', b'v' * 1000) for i in range(30)]") == [0] * 30
    (server,) = children(silent.pid)
    store = make_store(0)
    stop(server)
    try:
        healthy = make_worker(16 * MIB)
        wait_until(lambda: healthy("result = store.put('h', b'h')") == 0, 5)
        beside = []
        waiting = threading.Thread(target=lambda: beside.append(timed(store.get, "s0")))
        waiting.start()
        time.sleep(0.1)
        assert timed(store.get, "h")[1] < 0.5
        waiting.join()
        assert beside[0][0] == b""
        start = time.monotonic()
        for i in range(1, 30):
            assert store.get(f"s{i}") == b""
        assert store.get_batch([f"s{i}" for i in range(30)]) == [b""] * 30
        assert time.monotonic() - start < limit
        assert beside[0][1] < limit
    finally:
        os.kill(server, signal.SIGCONT)
    wait_until(lambda: store.get("s1") == b"v" * 1000, 5)
    assert store.transfer_stats()["tcp" if force_tcp else "shm"] >= 1000  # the better way, though it was silent once
