"""Nonsense on every port: never a crash, a hang, a leak, an internal error or a changed result for others."""

import contextlib
import random
import socket
import threading
import time
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from mooncake.errors import StoreError
from mooncake.rpc import frame
from mooncake.rpc import messages as m
from mooncake.rpc.data_messages import Write, WriteRecord
from mooncake.rpc.message import Message
from mooncake.rpc.messages import KINDS, encode
from tests.faults.test_kills import used
from tests.invariants.baseline import Baseline, settle
from tests.processes import children, gone, wait_until
from tests.wire import greeted, segments

MIB = 1 << 20
INTS = (0, 1, -1, 2, 255, 256, 4096, 1 << 20, -(1 << 62), (1 << 31) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)
TEXTS = ("", "k", "k0", "theirs", "\0", "é" * 40, "x" * 3000, "(", "127.0.0.1:1", "1-1", "@x", "segment", "client")


def anything(rng: random.Random, kind: Any, known: list[int]) -> Any:
    """A value of a field's type, rarely a sensible one; `known`: numbers that mean something."""
    origin = get_origin(kind)
    if origin is list:
        return [anything(rng, get_args(kind)[0], known) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 40)))]
    if origin is not None:  # a union
        return anything(rng, rng.choice(get_args(kind)), known)
    if kind is int:
        return rng.choice((*INTS, *known, *known, *known))
    if kind is str:
        return rng.choice(TEXTS)
    if kind is bool:
        return rng.random() < 0.5
    if kind is float:
        return rng.choice((0.0, -1.0, 1e300, float("nan"), float("inf"), time.time()))
    if kind is bytes:
        return rng.randbytes(rng.choice((0, 1, 2, 3)))
    if kind is type(None):
        return None
    return message(rng, kind, known)


def message(rng: random.Random, kind: type[msgspec.Struct], known: list[int]) -> msgspec.Struct:
    hints = get_type_hints(kind)
    return kind(**{name: anything(rng, hints[name], known) for name in kind.__struct_fields__})


def nonsense(rng: random.Random, known: list[int], kinds: tuple[type[Message], ...]) -> bytes:
    """One or more frames, or what looks like one."""
    what = rng.random()
    flags = rng.choice((0, 0, 0, 0, 1, 2, 2, 4, 0xFFFF))
    if what < 0.75:
        made = message(rng, rng.choice(kinds), known)
        return frame.pack(KINDS[type(made)], flags, rng.choice((0, 1, 0xFFFFFFFF)), encode(made))
    if what < 0.85:
        return frame.pack(rng.choice((0, 1, 9, 33, 34, 99, 0xFFFF)), flags, 1, rng.randbytes(rng.randrange(60)))
    if what < 0.93:
        return frame.HEADER.pack(rng.choice((0xFFFFFFFF, 1 << 20, 256 << 20)), rng.randrange(40), flags, 7)
    return rng.randbytes(rng.randrange(1, 3000))


class Bystander(threading.Thread):
    """A store that goes on meanwhile, and notes what goes wrong."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.rounds = 0
        self.stop = threading.Event()
        self._store = store

    def run(self) -> None:
        store, i = self._store, 0
        while not self.stop.is_set():
            i += 1
            start = time.monotonic()
            if store.put(f"mine{i % 50}", b"m" * 3000) != 0:
                self.wrong.append("put")
            if store.get("theirs") != b"t" * 5000:
                self.wrong.append("get")
            if store.get(f"mine{i % 50}") not in (b"m" * 3000,):
                self.wrong.append("get of its own")
            if store.batch_is_exist(["theirs", "missing"]) != [1, 0]:
                self.wrong.append("exist")
            if time.monotonic() - start > 2:
                self.wrong.append(f"{time.monotonic() - start:.1f} s")
            self.rounds += 1

    def finish(self) -> None:
        self.stop.set()
        self.join(10)
        assert not self.wrong, set(self.wrong)
        assert self.rounds > 5


def say(address: Any, data: list[bytes], hello: bytes) -> None:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as sock, contextlib.suppress(OSError):
        sock.settimeout(0.3)
        sock.connect(address)
        sock.sendall(hello)
        for piece in data:
            sock.sendall(piece)
        sock.settimeout(0.02)
        while sock.recv(1 << 16):
            pass


@pytest.mark.parametrize("port", ["master", "segment of the master", "tcp", "unix"])
@pytest.mark.parametrize("seed", range(1))
def test_nonsense(make_master, make_store, make_worker, tmp_path, capfd, port, seed):
    log = tmp_path / "master.log"
    master = make_master("--default_kv_lease_ttl=500", log=log)
    owner = make_worker(64 * MIB, at=master)
    (server,) = children(owner.pid)
    assert owner("result = store.put('theirs', b't' * 5000)") == 0
    store = make_store(0, at=master)
    assert store.get("theirs") == b"t" * 5000
    asking = greeted(master.port, client="5-5")
    (info,) = segments(asking, "theirs")
    term = asking.term
    bystander = Bystander(store)
    rng = random.Random(seed)
    pids = (master.process.pid, server)
    time.sleep(0.2)
    processes = {"master": master.process.pid, "server": server}
    baseline = Baseline(processes, kept=2)
    bystander.start()
    known = [info.segment, 1, 2, 3]
    kinds: tuple[type[Message], ...] = tuple(KINDS)
    if port.endswith("master"):
        address: Any = ("127.0.0.1", master.port)
        role = "segment" if "segment" in port else "client"
        hello = frame.pack(KINDS[m.Hello], 0, 1, encode(m.Hello(m.PROTOCOL, "x", role, "9-9", "h")))
        kinds = tuple(set(KINDS) - {m.Remove, m.RemoveAll, m.RemoveRegex})  # they would remove, of course
        if role == "client":
            kinds = tuple(set(kinds) - {m.Mount})
    elif port == "tcp":
        host, _, number = info.tcp.rpartition(":")
        address, hello = (host, int(number)), b""
        kinds = (m.Hello, m.Read, m.Write, m.Read, m.Write, m.Attach, m.Serve, m.Ping)
        known += [4096]  # not the master's term: who has that may write
        assert term not in known
    else:
        address, hello = "\0" + info.unix[1:], b""
        kinds = (m.Attach, m.Read, m.Write, m.Serve, m.Stop, m.Hello)
    end = time.monotonic() + 0.8
    while time.monotonic() < end:
        say(address, [nonsense(rng, known, kinds) for _ in range(rng.choice((1, 5, 30)))], hello)
    bystander.finish()
    asking.close()
    assert not any(gone(pid) for pid in pids)
    assert settle(lambda: baseline.excess(processes), 3) == []
    assert owner("result = store.get('theirs') == b't' * 5000")
    assert store.remove_all(force=True) >= 1
    wait_until(lambda: used(master) == 0 and master.metric("mooncake_quarantined_bytes") == 0, 12)
    assert "Traceback" not in log.read_text()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("tcp", ["", "nonsense", "127.0.0.1", "127.0.0.1:99999", ":1", "x:-1"])
def test_a_segment_that_nobody_can_reach_is_not_mounted(master, store, tcp):
    """Values would be placed there, and their callers would meet the address."""
    rogue = greeted(master.port, "segment", "7-7")
    with pytest.raises(StoreError, match="is not an address"):
        rogue.call(m.Mount(m.SegmentInfo(77, "rogue", MIB, tcp, "@x", "h", "7-7"), 0))
    assert [store.put(f"k{i}", b"v") for i in range(10)] == [0] * 10
    rogue.close()


@pytest.mark.parametrize("unix", ["", "@x", "\0", "x" * 300, "é"])
def test_a_segment_whose_server_is_not_there_costs_codes_and_no_exceptions(master, store, unix):
    rogue = greeted(master.port, "segment", "7-7")
    rogue.call(m.Mount(m.SegmentInfo(77, "rogue", MIB, "127.0.0.1:1", unix, "h", "7-7"), 0))
    start = time.monotonic()
    assert {store.put(f"k{i}", b"v") for i in range(10)} <= {0, -800}
    for i in range(10):
        assert store.get(f"k{i}") in (b"", b"v")
    assert time.monotonic() - start < 3
    rogue.close()


@pytest.mark.parametrize("seq", [-1, -(1 << 62), 1 << 62])
@pytest.mark.parametrize("key", ["k", "x" * 5000], ids=["short", "too long"])
def test_a_write_that_cannot_be_recorded_ends_its_stream_only(master, make_worker, capfd, seq, key):
    """By someone who knows the term: a number or a record that fits nowhere."""
    owner = make_worker(16 * MIB)
    assert owner("result = store.put('theirs', b't' * 5000)") == 0
    asking = greeted(master.port)
    (info,) = segments(asking, "theirs")
    host, _, number = info.tcp.rpartition(":")
    record = WriteRecord([40_000], seq, m.Body(key, 256, [8 * MIB, 256]))
    request = frame.pack(KINDS[m.Write], 0, 1, encode(Write(info.segment, asking.term, [record])))
    say((host, int(number)), [request + b"w" * 256], b"")
    assert owner("result = store.get('theirs') == b't' * 5000")
    asking.close()
    assert "Traceback" not in capfd.readouterr().err
