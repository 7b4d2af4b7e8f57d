"""More than anybody should ask: each of these costs its sender, and nobody else."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mooncake.errors import StoreError
from mooncake.rpc import frame
from mooncake.rpc import messages as m
from mooncake.rpc.data_messages import Read
from mooncake.rpc.descriptors import allow_many
from mooncake.rpc.messages import KINDS, encode
from mooncake.rpc.sockets import set_time_limit
from tests.processes import children, stop, wait_until
from tests.wire import greeted, segments

MIB = 1 << 20


def resident(pid: int) -> int:
    """Bytes of memory that a process has of its own."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def tcp_address(info: m.SegmentInfo) -> tuple[str, int]:
    host, _, port = info.tcp.rpartition(":")
    return host, int(port)


@pytest.fixture
def pool(master, make_worker):
    """(owner of a segment that holds "k", where the segment is)."""
    owner = make_worker(64 * MIB)
    assert owner("result = store.put('k', b'v' * (16 << 20))") == 0
    friend = greeted(master.port)
    (info,) = segments(friend, "k")
    friend.close()
    return owner, info


def test_readers_that_read_nothing(master, pool, make_store, monkeypatch):
    """They ask for 16 MiB again and again: neither memory nor others' time goes into that."""
    owner, info = pool
    (server,) = children(owner.pid)
    before = resident(server)
    request = frame.pack(KINDS[Read], frame.REQUEST, 1, encode(Read(info.segment, [0, 16 * MIB], 0, 0)))
    crowd = []
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            sock = stack.enter_context(socket.create_connection(tcp_address(info), 5))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(request * 50)
            crowd.append(sock)
        monkeypatch.setenv("MC_FORCE_TCP", "1")
        store = make_store(0)
        for _ in range(3):
            began = time.monotonic()
            assert store.get("k") == b"v" * (16 * MIB)
            assert time.monotonic() - began < 2
        assert resident(server) - before < 64 * MIB
    wait_until(lambda: threads(server) < 40, 10, "their threads have ended")


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.parametrize("length", [(1 << 30), (1 << 32) - 1, frame.MAX_BODY + 1])
def test_a_header_of_a_gigabyte(master, pool, length):
    """The connection is closed, and nothing is set aside for it."""
    owner, info = pool
    (server,) = children(owner.pid)
    unix = "\0" + info.unix[1:]
    for pid, family, address in (
        (master.process.pid, socket.AF_INET, ("127.0.0.1", master.port)),
        (server, socket.AF_INET, tcp_address(info)),
        (server, socket.AF_UNIX, unix),
    ):
        before = resident(pid)
        for kind in (m.Hello, m.Exist, Read):
            with socket.socket(family) as sock:
                sock.settimeout(5)
                sock.connect(address)
                with contextlib.suppress(ConnectionError):
                    sock.sendall(frame.HEADER.pack(length, KINDS[kind], 0, 1) + b"x" * 1000)
                    while sock.recv(4096):
                        pass
        assert resident(pid) - before < 16 * MIB
    assert owner("result = store.is_exist('k')") == 1


def test_headers_of_much_that_never_comes(pool):
    """As long as they may be: memory is not touched before bytes are there."""
    owner, info = pool
    (server,) = children(owner.pid)
    before = resident(server)
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            sock = stack.enter_context(socket.create_connection(tcp_address(info), 5))
            sock.sendall(frame.HEADER.pack(frame.MAX_BODY, KINDS[Read], 0, 1) + b"x" * 1000)
        time.sleep(0.5)
        assert resident(server) - before < 64 * MIB
        assert owner("result = store.is_exist('k')") == 1


@pytest.mark.slow
def test_ten_million_keys_in_one_call(master, pool, make_store):
    """Refused or answered in parts; whoever else asks meanwhile is answered."""
    store = make_store(0)
    beside = subprocess.Popen(
        [sys.executable, "-c", _ASK, str(master.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert beside.stdout.readline() == "ready\n"
        keys = ["k"] * 10_000_000
        codes = store.batch_is_exist(keys)
        assert len(codes) == len(keys)
        assert set(codes) in ({1}, {-600}), set(codes)
    finally:
        slowest = float(beside.communicate("\n", timeout=30)[0])
    assert slowest < 1.0


_ASK = """
import select, sys, time
from mooncake.rpc.messages import Exist
from tests.wire import greeted
connection = greeted(int(sys.argv[1]))
print("ready", flush=True)
slowest = 0.0
while not select.select([sys.stdin], [], [], 0.001)[0]:
    began = time.monotonic()
    connection.call(Exist(["k"]))
    slowest = max(slowest, time.monotonic() - began)
print(slowest)
"""


def test_ten_million_keys_in_one_message(master, pool):
    """By somebody who does not split them: refused before they are looked at."""
    owner, _ = pool
    beside = subprocess.Popen(
        [sys.executable, "-c", _ASK, str(master.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert beside.stdout.readline() == "ready\n"
        rogue = greeted(master.port)
        set_time_limit(rogue.sock, 30)
        with pytest.raises((StoreError, OSError), match=r"at most|closed|reset"):
            rogue.call(m.Exist(["k"] * 10_000_000))
        rogue.close()
    finally:
        slowest = float(beside.communicate("\n", timeout=30)[0])
    assert slowest < 0.3
    assert owner("result = store.is_exist('k')") == 1


@pytest.mark.slow
@pytest.mark.parametrize("door", ["master", "data"])
def test_ten_thousand_connections(master, pool, make_store, door, monkeypatch):
    """All of them say nothing.  Members go on, and new ones come in at the master's."""
    allow_many()
    owner, info = pool
    (server,) = children(owner.pid)
    pid = master.process.pid if door == "master" else server
    address = ("127.0.0.1", master.port) if door == "master" else tcp_address(info)
    before = resident(pid)
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    store = make_store(0)
    assert store.get("k") == b"v" * (16 * MIB)
    with contextlib.ExitStack() as stack:
        for _ in range(10_000):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
        crowd = still(pid)
        assert crowd > (3000 if door == "master" else 500), "most of them are kept out"
        for _ in range(5):
            began = time.monotonic()
            assert store.get("k") == b"v" * (16 * MIB)
            assert time.monotonic() - began < 3
        if door == "master":
            make_store(0)
        assert resident(pid) - before < 512 * MIB
    wait_until(lambda: descriptors(pid) < 200, 20, "they are gone")
    assert store.get("k") == b"v" * (16 * MIB)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def still(pid: int) -> int:
    """Its descriptors once there come no more: how many it can take, and how soon, differs between machines."""
    before, end = -1, time.monotonic() + 30
    while (now := descriptors(pid)) != before and time.monotonic() < end:
        before = now
        time.sleep(1)
    return now


# ------------------------------------------------------------ starvation


@pytest.mark.slow
@pytest.mark.parametrize("who", ["segment server", "master", "both"])
def test_a_process_that_hardly_runs_is_not_dead(make_master, make_worker, make_store, who):
    """It gets a twentieth of a processor for 12 s, in slices a second apart: it stays mounted, nothing is lost."""
    master = make_master("--client_ttl=5")
    owner = make_worker(16 * MIB, at=master)
    assert owner("result = store.put('k', b'v' * 1000)") == 0
    (server,) = children(owner.pid)
    mounts = master.metric("master_mount_segment_requests_total")
    again = master.metric("master_remount_segment_requests_total")
    pids = {"segment server": [server], "master": [master.process.pid], "both": [server, master.process.pid]}[who]
    end = time.monotonic() + 12
    while time.monotonic() < end:
        for pid in pids:
            stop(pid)
        time.sleep(0.95)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)
    assert owner("result = store.get('k') == b'v' * 1000")
    assert master.metric("master_mount_segment_requests_total") == mounts
    assert master.metric("master_remount_segment_requests_total") == again, "it was given up"


@pytest.mark.slow
def test_a_busy_machine_is_not_a_dead_one(master, make_worker):
    """Many processes that want all processors, and a segment server that is the least important of all."""
    owner = make_worker(16 * MIB)
    assert owner("result = store.put('k', b'v' * 1000)") == 0
    (server,) = children(owner.pid)
    os.setpriority(os.PRIO_PROCESS, server, 19)
    again = master.metric("master_remount_segment_requests_total")
    count = 4 * (os.cpu_count() or 1)
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY, str(os.getpid())]) for _ in range(count)]
    try:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            assert owner("result = store.get('k') == b'v' * 1000")
            time.sleep(0.2)
    finally:
        for one in busy:
            one.kill()
            one.wait()
    assert master.metric("master_remount_segment_requests_total") == again


_BUSY = """
import os, sys
parent = int(sys.argv[1])
while os.getppid() == parent:
    sum(range(100000))
"""
