"""Descriptors: none is left behind, and a process that has none left goes on."""

import fcntl
import os
import resource
import socket
import time
import urllib.request

import pytest

from mooncake.segment.writers import Writer
from mooncake.store import MooncakeDistributedStore
from tests.invariants.baseline import Baseline, settle
from tests.processes import children, gone, wait_until
from tests.wire import greeted, segments

MIB = 1 << 20


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("force_tcp", ["", "1"])
def test_joining_and_leaving_again_and_again_leaves_nothing(master, make_worker, monkeypatch, force_tcp):
    """In one process that lives on, as engines do that are rebuilt in place."""
    monkeypatch.setenv("MC_FORCE_TCP", force_tcp)
    owner = make_worker(64 * MIB)
    (server,) = children(owner.pid)
    assert owner("result = store.put('k', b'v' * 1000)") == 0
    processes = {"this one": os.getpid(), "server": server, "master": master.process.pid}

    def cycle(i: int) -> None:
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", master.address) == 0
        assert store.put(f"k{i}", b"w" * 1000) == 0
        assert store.get("k") == b"v" * 1000
        store.close()

    cycle(0)
    time.sleep(0.1)
    baseline = Baseline(processes, kept=1)
    for i in range(1, 40):
        cycle(i)
    assert settle(lambda: baseline.excess(processes), 2) == []


@pytest.mark.parametrize("port", ["unix", "tcp", "master"])
def test_a_process_without_descriptors_goes_on(master, make_worker, make_store, monkeypatch, port):
    owner = make_worker(16 * MIB)
    (server,) = children(owner.pid)
    assert owner("result = store.put('k', b'v' * 1000)") == 0
    connection = greeted(master.port)
    (info,) = segments(connection, "k")
    victim = master.process.pid if port == "master" else server
    resource.prlimit(victim, resource.RLIMIT_NOFILE, (64, 64))
    crowd = []
    for _ in range(100):
        try:
            if port == "unix":
                crowd.append(socket.socket(socket.AF_UNIX))
                crowd[-1].settimeout(0.2)
                crowd[-1].connect("\0" + info.unix[1:])
            else:
                address = info.tcp.rpartition(":") if port == "tcp" else ("127.0.0.1", ":", master.port)
                crowd.append(socket.create_connection((address[0], int(address[2])), 0.2))
        except OSError:
            break
    time.sleep(0.3)
    assert not gone(victim)
    assert owner("result = store.get('k').decode()") == "v" * 1000  # over the connections that it has
    for sock in crowd:
        sock.close()
    wait_until(lambda: descriptors(victim) < 60, 2)
    if port == "tcp":
        monkeypatch.setenv("MC_FORCE_TCP", "1")
    store = make_store(0)
    wait_until(lambda: store.get("k") == b"v" * 1000, 2)
    assert store.transfer_stats()["tcp" if port == "tcp" else "shm"] >= 1000
    connection.close()


def test_a_master_without_descriptors_while_it_starts_goes_on(make_master, tmp_path):
    """Its HTTP server's modules are read after it serves."""
    log = tmp_path / "log"
    master = make_master(log=log)
    soft, hard = resource.prlimit(master.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(master.process.pid, resource.RLIMIT_NOFILE, (8, hard))
    wait_until(lambda: b"cannot be imported yet" in log.read_bytes() or b"admin server started" in log.read_bytes(), 20)
    assert master.answers()
    resource.prlimit(master.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
    wait_until(lambda: b"admin server started" in log.read_bytes(), 20)
    with urllib.request.urlopen(f"http://127.0.0.1:{master.metrics_port}/health", timeout=5) as answer:
        assert answer.status == 200


def test_a_writer_is_watched_by_whatever_descriptor():
    """select() takes none above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip("too few descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    pidfd = os.pidfd_open(os.getpid())
    high = fcntl.fcntl(pidfd, fcntl.F_DUPFD, 2000)
    try:
        assert Writer(1, pidfd=high).alive()
    finally:
        os.close(pidfd)
        os.close(high)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
