"""Values of other hosts: forced tcp on loopback, and real network namespaces.  The transport's counter is asserted."""

import os
import signal
import subprocess
import time

import numpy as np
import pytest

from mooncake.store import ReplicateConfig
from tests.hosts import Hosts
from tests.processes import Master, children, stop, wait_until

MIB = 1 << 20

MULTI = """
import numpy as np
rng = np.random.default_rng(3)
memory = rng.integers(0, 256, 2 * keys * pieces * size, np.uint8)
base, half = memory.ctypes.data, keys * pieces * size
if registered:
    assert store.register_buffer(base, memory.nbytes) == 0
order = rng.permutation(keys).tolist()
where = [[base + (layer * keys + order[k]) * size for layer in range(pieces)] for k in range(keys)]
sizes = [[size] * pieces for _ in range(keys)]
names = [f"{size}-{pieces}-{k}" for k in range(keys)]
puts = store.batch_put_from_multi_buffers(names, where, sizes)
gets = store.batch_get_into_multi_buffers(names, [[p + half for p in ps] for ps in where], sizes)
result = [puts == [0] * keys, gets == [size * pieces] * keys, bool((memory[:half] == memory[half:]).all()),
          store.transfer_stats()]
"""

FORCED = {"MC_FORCE_TCP": "1"}


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize(
    ("keys", "pieces", "size"), [(16, 32, 4096), (4, 3, 333), (8, 16, 65536), (2, 2, 3 * MIB), (64, 64, 512)]
)
def test_forced_tcp_batches(make_store, make_worker, keys, pieces, size, registered):
    make_store(64 * MIB)
    worker = make_worker(env=FORCED)
    put, got, equal, stats = worker(MULTI, keys=keys, pieces=pieces, size=size, registered=registered)
    assert put
    assert got
    assert equal
    assert stats["shm"] == 0
    assert stats["tcp"] == 2 * keys * pieces * size


def test_same_host_is_shared_memory(make_store, make_worker):
    make_store(64 * MIB)
    put, got, equal, stats = make_worker()(MULTI, keys=16, pieces=32, size=4096, registered=True)
    assert put
    assert got
    assert equal
    assert stats == {"local": 0, "shm": 2 * 16 * 32 * 4096, "tcp": 0}


def test_bytes_over_tcp(make_store, make_worker):
    owner = make_store(64 * MIB)
    worker = make_worker(env=FORCED)
    data = np.random.default_rng(1).integers(0, 256, 5 * MIB + 7, np.uint8).tobytes()
    owner.put("from-owner", data)
    owner.put("small", b"tiny")
    assert (
        worker("import hashlib; result = hashlib.sha256(store.get('from-owner')).hexdigest()")
        == __import__("hashlib").sha256(data).hexdigest()
    )
    assert worker("result = store.get('small').decode()") == "tiny"
    assert worker("result = store.put('from-worker', b'x' * 3_000_000)") == 0
    assert owner.get("from-worker") == b"x" * 3_000_000


def test_bad_memory_over_tcp_is_an_error_and_leaves_nothing(master, make_store, make_worker):
    make_store(32 * MIB)
    worker = make_worker(env=FORCED)
    code = worker("""
import ctypes, mmap
room = mmap.mmap(-1, 1 << 20)
base = ctypes.addressof(ctypes.c_char.from_buffer(room))
ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + (1 << 19)), 1 << 19, 0)
result = [store.put_from('bad', base, 1 << 20), store.is_exist('bad'), store.put('good', b'v')]
""")
    assert code == [-800, 0, 0]
    assert worker("result = store.get('good').decode()") == "v"
    wait_until(lambda: master.metric("master_allocated_bytes") <= 4096, 3)


@pytest.mark.slow
def test_peer_that_is_killed_or_stopped_costs_one_bounded_wait(make_store, make_worker):
    owner = make_worker(32 * MIB)
    owner("for i in range(8): store.put(f'k{i}', b'v' * 100000)")
    reader = make_worker(env=FORCED)
    assert reader("result = len(store.get('k0'))") == 100000
    (server,) = children(owner.pid)
    stop(server)
    try:
        start = time.monotonic()
        assert reader("result = [len(store.get(f'k{i}')) for i in range(3)]") == [0, 0, 0]
        assert time.monotonic() - start < 12
    finally:
        os.kill(server, signal.SIGCONT)
    wait_until(lambda: reader("result = len(store.get('k0'))") == 100000, 5)
    os.kill(server, signal.SIGKILL)
    start = time.monotonic()
    assert reader("result = [len(store.get(f'k{i}')) for i in range(8)]") == [0] * 8
    assert time.monotonic() - start < 5


def test_idle_streams_whose_peer_closed_them_are_replaced(make_store, make_worker):
    """A restarted peer, or one that closed an idle stream, must not fail the next transfer."""
    make_store(32 * MIB)
    worker = make_worker(env=FORCED)
    worker("store.put('k', b'v' * 1000); store.get('k')")
    worker("""
import socket
for attachment in store._client.attachments._by_segment.values():
    for stream in attachment.transport._streams._idle:
        stream.sock.shutdown(socket.SHUT_RDWR)
""")
    assert worker("result = [len(store.get('k')), store.put('k2', b'w')]") == [1000, 0]


@pytest.fixture
def hosts(cleanup):
    try:
        made = Hosts(3)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    cleanup.callback(made.close)
    return made


@pytest.mark.netns
def test_other_hosts(hosts, cleanup, make_worker, tmp_path):
    log = tmp_path / "master.log"
    master = Master(log=log, prefix=hosts.inside(0), address=hosts.addresses[0])
    cleanup.callback(master.stop)
    wait_until(lambda: log.exists() and "Master service started" in log.read_text(), what="the master's log line")
    owner = make_worker(64 * MIB, host=hosts.addresses[1], at=master, prefix=hosts.inside(1))
    reader = make_worker(host=hosts.addresses[2], at=master, prefix=hosts.inside(2))
    neighbour = make_worker(host=hosts.addresses[1], at=master, prefix=hosts.inside(1))
    assert owner("result = store.put('k', b'v' * 1_000_000)") == 0
    assert reader("result = store.get('k') == b'v' * 1_000_000")
    assert reader("result = store.put('back', b'w' * 500_000)") == 0
    assert owner("result = store.get('back') == b'w' * 500_000")
    assert reader("result = store.transfer_stats()") == {"local": 0, "shm": 0, "tcp": 1_500_000}
    assert owner("result = store.transfer_stats()") == {"local": 1_500_000, "shm": 0, "tcp": 0}
    assert reader("result = store.read_stats()") == {"local": 0, "shm": 0, "tcp": 1_000_000}
    assert owner("result = store.read_stats()") == {"local": 500_000, "shm": 0, "tcp": 0}, "not what it put"
    assert neighbour("result = len(store.get('k'))") == 1_000_000
    assert neighbour("result = store.transfer_stats()") == {"local": 0, "shm": 1_000_000, "tcp": 0}
    put, got, equal, _ = reader(MULTI, keys=8, pieces=16, size=16384, registered=True)
    assert put
    assert got
    assert equal


@pytest.mark.slow
@pytest.mark.netns
def test_a_host_that_is_cut_off(hosts, cleanup, make_worker, tmp_path):
    log = tmp_path / "master.log"
    master = Master("--client_ttl=3", log=log, prefix=hosts.inside(0), address=hosts.addresses[0])
    cleanup.callback(master.stop)
    wait_until(lambda: log.exists() and "Master service started" in log.read_text(), what="the master's log line")
    owner = make_worker(32 * MIB, host=hosts.addresses[1], at=master, prefix=hosts.inside(1))
    reader = make_worker(host=hosts.addresses[2], at=master, prefix=hosts.inside(2))
    assert owner("result = store.put('k', b'v' * 100_000)") == 0
    assert reader("result = len(store.get('k'))") == 100_000
    cut = ["ip", "-n", hosts.names[1], "link", "set", "eth0", "down"]
    subprocess.run(cut, check=True)
    start = time.monotonic()
    assert reader("result = len(store.get('k'))") == 0
    assert time.monotonic() - start < 8
    wait_until(lambda: reader("result = store.is_exist('k')") == 0, 8, "the silent segment expired")
    subprocess.run([*cut[:-1], "up"], check=True)
    wait_until(lambda: reader("result = len(store.get('k'))") == 100_000, 20, "it came back with its values")


def test_replicas_lie_on_different_segments(make_store, make_worker):
    first = make_store(32 * MIB)
    second = make_worker(32 * MIB)
    config = ReplicateConfig()
    config.replica_num = 2
    assert first.put("k", b"v" * 10000, config) == 0
    assert (
        len({r.get_memory_descriptor().buffer_descriptor.transport_endpoint for r in first.get_replica_desc("k")}) == 2
    )
    second.kill()
    reader = make_worker()
    wait_until(lambda: reader("result = len(store.get('k'))") == 10000, 5)
