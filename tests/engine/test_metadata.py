"""Engines that find one another through a metadata service: the same tests for every kind of it, on real servers that
are killed, stopped and started again empty."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mooncake.engine import TransferEngine
from mooncake.transfer.metadata.entries import address_key, memory_key
from tests.engine.conftest import HOST, MIB, timed
from tests.engine.services import EACH_KIND, start_service
from tests.processes import Worker, free_port, wait_until

P2P = "P2PHANDSHAKE"
START = """
import ctypes
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
engine = TransferEngine()
code = engine.initialize(name, metadata, "tcp", "")
memory = ctypes.create_string_buffer(size)
base = ctypes.addressof(memory)
if code == 0:
    assert engine.register_memory(base, size) == 0
result = [code, f"127.0.0.1:{engine.get_rpc_port()}", base]
"""


class Engine(Worker):
    """A process with an engine and registered memory.  `name` is what peers call it."""

    def __init__(self, metadata: str, size: int = MIB, name: str = "", **options):
        super().__init__(**options)
        given = name or f"{HOST}:{free_port()}"
        self.code, self.address, self.base = self(START, metadata=metadata, name=given, size=size)
        self.name = self.address if metadata == P2P else given

    def write(self, other: "Engine", value: int, offset: int = 0, length: int = 1000) -> int:
        return self(
            "memory[:length] = bytes([value]) * length\nresult = engine.transfer_sync_write(peer, base, at, length)",
            peer=other.name,
            value=value,
            at=other.base + offset,
            length=length,
        )

    def byte(self, offset: int = 0) -> int:
        return self("result = memory[offset][0]", offset=offset)


@pytest.fixture
def make_engine(cleanup):
    def make(metadata: str, **options) -> Engine:
        engine = Engine(metadata, **options)
        cleanup.callback(engine.close)
        return engine

    return make


@pytest.fixture(params=[P2P, *EACH_KIND])
def metadata(request, cleanup, tmp_path):
    """What engines are told, of every kind."""
    if request.param == P2P:
        return P2P
    made = start_service(request.param, tmp_path)
    cleanup.callback(made.close)
    return made.address


def entry(service, engine) -> bytes | None:
    return service.backend().get(address_key(engine.name))


# -- what works whatever the service


def test_two_processes(metadata, make_engine):
    one, two = make_engine(metadata), make_engine(metadata)
    assert one.code == two.code == 0
    assert one.write(two, 5) == 0
    assert two.byte(999) == 5
    assert two.byte(1000) == 0
    assert two.write(one, 6, offset=10) == 0
    assert one.byte(10) == 6
    assert one.write(one, 7, offset=5000) == 0  # its own name
    assert one.byte(5999) == 7
    assert one("result = engine.get_first_buffer_address(peer)", peer=two.name) == two.base
    assert one("result = engine.send_probe(peer)", peer=two.name) == 0
    assert one("result = engine.transfer_sync(peer, base, at, 8, TransferOpcode.Write, TransferNotify('n', 'm'))",
               peer=two.name, at=two.base) == 0  # fmt: skip
    assert two("result = [(n.name, n.msg) for n in engine.get_notifies()]") == [["n", "m"]]
    number = one("result = engine.transfer_submit_write(peer, base, at, 8)", peer=two.name, at=two.base)
    assert one("result = engine.get_batch_transfer_status([number])", number=number) == 0


def test_names_that_nobody_has(metadata, make_engine):
    one = make_engine(metadata)
    for name in (f"{HOST}:{free_port()}", "nobody", "a b/ü?&=#%2f", "", "x" * 5000, "\n"):
        codes = one(
            """
result = [
    engine.transfer_sync_write(name, base, base, 8),
    engine.batch_transfer_async_write(name, [base], [base], [8]),
    engine.get_first_buffer_address(name),
]
probe = engine.send_probe(name)
assert probe < 0
if metadata != "P2PHANDSHAKE":
    assert probe == -200
""",
            name=name,
        )
        assert codes == [-1, 0, 0], name


def test_restarted_under_its_name(metadata, make_engine, monkeypatch):
    """A process that was killed comes back; whoever knew it goes on, on the same port or another."""
    port = free_port()
    one = make_engine(metadata)
    monkeypatch.setenv("MC_MIN_RPC_PORT", str(port))
    monkeypatch.setenv("MC_MAX_RPC_PORT", str(port))
    name = f"{HOST}:{port}"
    for life in range(3):
        if life == 2 and metadata != P2P:
            monkeypatch.undo()
        two = make_engine(metadata, name=name)
        assert two.code == 0
        assert one.write(two, life + 1) == 0
        assert two.byte(999) == life + 1
        two.kill()
        assert one.write(two, 9) == -1


# -- who has a name


def test_a_living_process_keeps_its_name(service, make_engine):
    one, two = make_engine(service.address), make_engine(service.address)
    (code, took) = timed(lambda: make_engine(service.address, name=two.name).code)
    assert code == -1
    assert took < 5
    assert one.write(two, 3) == 0
    again = Worker()
    try:
        lines = again(
            """
import logging
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("mooncake").addHandler(Lines())
from mooncake.engine import TransferEngine
assert TransferEngine().initialize(name, metadata, "tcp", "") == -1
result = lines
""",
            name=two.name,
            metadata=service.address,
        )
    finally:
        again.close()
    assert len(lines) == 1
    assert "is the name of a living process" in lines[0]


def test_entries(service, make_engine, monkeypatch):
    """What is kept is what the C++ engine keeps, and a number of the process's life."""
    monkeypatch.setenv("MC_METADATA_CLUSTER_ID", "blue")
    monkeypatch.setenv("MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "1")
    one = make_engine(service.address)
    backend, (host, port) = service.backend(), one.address.split(":")
    address = json.loads(backend.get(f"mooncake/blue/rpc_meta/{one.name}"))
    assert address.pop("instance")
    assert address == {"ip_or_host_name": host, "rpc_port": int(port)}
    wait_until(lambda: json.loads(backend.get(f"mooncake/blue/ram/{one.name}"))["buffers"], 8, "the memory's entry")
    memory = json.loads(backend.get(f"mooncake/blue/ram/{one.name}"))
    assert memory["buffers"] == [{"name": "*", "addr": one.base, "length": MIB}]
    assert [memory[name] for name in ("name", "protocol", "tcp_data_port")] == [one.name, "tcp", int(port)]
    monkeypatch.setenv("MC_METADATA_CLUSTER_ID", "green")
    other = make_engine(service.address, name=one.name)  # another cluster's names are its own
    assert other.code == 0
    assert other("result = engine.get_first_buffer_address(name)", name=one.name) == other.base
    one.close()
    assert backend.get(f"mooncake/blue/rpc_meta/{one.name}") is None
    assert backend.get(f"mooncake/blue/ram/{one.name}") is None
    assert backend.get(f"mooncake/green/rpc_meta/{one.name}")


def test_close_takes_back_its_own_entry_only(service, make_engine):
    one = make_engine(service.address)
    backend = service.backend()
    fork = """
import atexit, os
pid = os.fork()
if pid == 0:
    atexit._run_exitfuncs()
    os._exit(7)
result = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    assert one(fork) == 7
    assert entry(service, one), "a forked child took its parent's entry away"
    mine = backend.get(address_key(one.name))
    other = json.dumps({**json.loads(mine), "instance": "1234"}).encode()
    assert backend.replace(address_key(one.name), mine, other)
    one.close()
    assert backend.get(address_key(one.name)) == other


@pytest.mark.parametrize("ending", ["pass", "engine.__del__()", "del engine"])
def test_a_process_that_ends_takes_its_entries_back(service, ending):
    name = f"{HOST}:{free_port()}"
    code = f"""
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize({name!r}, {service.address!r}, "tcp", "") == 0
{ending}
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20, check=False)
    assert (run.returncode, run.stderr) == (0, b"")
    assert service.backend().get(address_key(name)) is None
    assert service.backend().get(memory_key(name)) is None


def test_a_port_that_another_process_has_by_now(service, make_engine, monkeypatch):
    """Neither a known peer nor a stale entry makes bytes land in the wrong process."""
    one, fresh = make_engine(service.address), make_engine(service.address)
    port = free_port()
    monkeypatch.setenv("MC_MIN_RPC_PORT", str(port))
    monkeypatch.setenv("MC_MAX_RPC_PORT", str(port))
    two = make_engine(service.address)
    assert one.write(two, 1) == 0
    two.kill()
    three = make_engine(service.address)
    assert three.address == two.address
    two.base = three.base
    for transfer in (one, fresh):
        assert transfer.write(two, 9) == -1
        assert transfer("result = engine.send_probe(peer)", peer=two.name) == -102
        assert transfer.write(three, 4, offset=5000) == 0
    assert three.byte(0) == 0
    assert three.byte(5000) == 4
    # Its name is free, as that entry's process is gone.
    monkeypatch.undo()
    back = make_engine(service.address, name=two.name)
    assert back.code == 0
    assert one.write(back, 8) == 0
    assert back.byte(0) == 8


GARBAGE = [
    b"\x00\xff\xfe",
    b"{",
    b"[" * 100_000,
    b"null",
    b"[]",
    b'"text"',
    b"{}",
    b'{"ip_or_host_name": "127.0.0.1"}',
    b'{"ip_or_host_name": 5, "rpc_port": 15000}',
    b'{"ip_or_host_name": "", "rpc_port": 15000}',
    b'{"ip_or_host_name": "a b", "rpc_port": 15000}',
    b'{"ip_or_host_name": "127.0.0.1", "rpc_port": "15000"}',
    b'{"ip_or_host_name": "127.0.0.1", "rpc_port": 0}',
    b'{"ip_or_host_name": "127.0.0.1", "rpc_port": 1e99}',
    b'{"ip_or_host_name": "127.0.0.1", "rpc_port": true}',
    b'{"ip_or_host_name": "127.0.0.1", "rpc_port": 15000, "instance": 7}',
    b'{"ip_or_host_name": "127.0.0.1", "rpc_port": 15000, "instance": "xyz"}',
    b'{"ip_or_host_name": "' + b"x" * 1_000_000 + b'", "rpc_port": 15000}',
]


def test_garbage_in_an_entry(service, make_engine, caplog):
    engine = TransferEngine()
    assert engine.initialize(f"{HOST}:{free_port()}", service.address, "tcp", "") == 0
    backend, name = service.backend(), f"{HOST}:{free_port()}"
    for number, value in enumerate(GARBAGE):
        caplog.clear()
        backend.put(address_key(f"bad-{number}"), value)
        assert engine.transfer_sync_write(f"bad-{number}", 4096, 4096, 8) == -1
        assert "cannot be used" in caplog.text
        assert len(caplog.records) == 1
        assert len(caplog.text) < 600
    backend.put(address_key(name), GARBAGE[1])
    assert make_engine(service.address, name=name).code == 0  # nobody's entry: replaced
    engine._leave()


# -- losing the service


@pytest.mark.slow
def test_a_service_that_was_killed_and_is_empty(service, make_engine):
    one, two = make_engine(service.address), make_engine(service.address)
    assert one.write(two, 1) == 0
    service.kill()
    for value in range(2, 6):  # known peers are reached as before
        code, took = timed(one.write, two, value)
        assert code == 0
        assert took < 0.5
    code, took = timed(two.write, one, 1)  # others are not, at once
    assert code == -1
    assert took < 3
    assert make_engine(service.address).code == -1
    service.start()
    started = time.monotonic()
    wait_until(lambda: entry(service, one) and entry(service, two), 8, "both entries")
    assert time.monotonic() - started < 6
    three = make_engine(service.address)
    assert three.code == 0
    assert three.write(one, 7) == 0
    assert wait_until(lambda: two.write(one, 8) == 0, 5)
    assert service.backend().get(memory_key(one.name))


@pytest.mark.slow
def test_a_service_that_is_stopped(service, make_engine, cleanup):
    one, two, three = (make_engine(service.address) for _ in range(3))
    assert one.write(two, 1) == 0
    service.freeze()
    cleanup.callback(service.thaw)
    code, took = timed(two.write, one, 2)
    assert code == -1
    assert took < 5
    code, took = timed(two.write, one, 2)  # found out before
    assert code == -1
    assert took < 5
    code, took = timed(lambda: make_engine(service.address).code)
    assert code == -1
    assert took < 8
    for value in range(3, 6):
        code, took = timed(one.write, two, value)
        assert code == 0
        assert took < 0.5
    _, took = timed(lambda: three("engine._leave()"))
    assert took < 4
    three.kill()
    two.kill()
    code, took = timed(one.write, two, 9)  # dead, and nobody to ask where it may be now
    assert code == -1
    assert took < 5
    service.thaw()
    four = make_engine(service.address, name=two.name)
    assert four.code == 0
    assert wait_until(lambda: one.write(four, 9) == 0, 8)
    assert four.byte() == 9


@pytest.mark.slow
def test_an_entry_that_somebody_deleted_or_took(service, make_engine, monkeypatch):
    monkeypatch.setenv("MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "1")
    one, two = make_engine(service.address), make_engine(service.address)
    backend = service.backend()
    mine = entry(service, one)
    assert backend.remove(address_key(one.name), mine)
    wait_until(lambda: entry(service, one) == mine, 5, "the entry that was deleted")
    # One whose process is alive is left alone, one whose process is gone is replaced.
    assert backend.replace(address_key(one.name), mine, entry(service, two))
    time.sleep(2.5)
    assert entry(service, one) == entry(service, two)
    two.kill()
    wait_until(lambda: entry(service, one) == mine, 8, "the name that is free again")


@pytest.mark.slow
def test_the_service_stops_in_the_middle_of_everything(service, make_engine):
    """Kills and starts in turn under a load of transfers: none fails, nothing wrong arrives."""
    one, two = make_engine(service.address), make_engine(service.address)
    assert one.write(two, 1) == 0
    one.send(
        """
import time
end, codes, slowest = time.monotonic() + 6, set(), 0
while time.monotonic() < end:
    began = time.monotonic()
    codes.add(engine.transfer_sync_write(peer, base, at, 1000))
    slowest = max(slowest, time.monotonic() - began)
    time.sleep(0.005)
result = [sorted(codes), slowest]
""",
        peer=two.name,
        at=two.base,
    )
    for _ in range(2):
        service.kill()
        time.sleep(0.7)
        service.start()
        time.sleep(0.7)
    codes, slowest = one.receive()
    assert codes == [0]
    assert slowest < 1
    wait_until(lambda: entry(service, one) and entry(service, two), 8)


def test_killed_processes_leave_nothing_for_long(service):
    """Their entries end by themselves, where the server can do that (U032)."""
    if not service.forgets:
        pytest.skip("this server keeps entries until they are deleted")
    worker = Worker()
    code, _, _ = worker(START, metadata=service.address, name="short-lived", size=4096)
    assert code == -1  # no such host
    name = f"{HOST}:{free_port()}"
    assert worker(START, metadata=service.address, name=name, size=4096)[0] == 0
    worker.kill()
    worker.close()
    backend = service.backend(1)
    assert backend.get(address_key(name))
    value = backend.get(address_key(name))
    # The entry has a time to live, which we shorten instead of waiting for its end.
    assert backend.replace(address_key(name), value, value)
    wait_until(lambda: backend.get(address_key(name)) is None, 8)


def test_missing_extras(cleanup):
    """One sentence says what to install."""
    code = """
import sys, logging
sys.modules["etcd3gw"] = sys.modules["redis"] = None
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("mooncake").addHandler(Lines())
from mooncake.engine import TransferEngine
codes = [TransferEngine().initialize("127.0.0.1:1", at, "tcp", "") for at in ("etcd://127.0.0.1:1", "redis://127.0.0.1:1")]
print(codes, *lines, sep="\\n")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    codes, etcd, redis = run.stdout.splitlines()
    assert codes == "[-1, -1]"
    assert "pip install 'mooncake-py[etcd]'" in etcd
    assert "pip install 'mooncake-py[redis]'" in redis
    assert not run.stderr


def test_the_http_back_end_starts_fast(cleanup, tmp_path):
    """No HTTP library but the standard one's client, nothing of the service at import."""
    service = start_service("http", tmp_path)
    cleanup.callback(service.close)
    code = f"""
import sys
from mooncake.engine import TransferEngine
assert "http" not in sys.modules
assert TransferEngine().initialize("127.0.0.1:1", {service.address!r}, "tcp", "") == 0
assert not {{"aiohttp", "requests", "urllib3", "redis", "etcd3gw", "asyncio"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)


def test_signals_are_not_in_the_way(cleanup, make_engine, tmp_path):
    """An engine's process that is stopped for long comes back with its entry."""
    service = start_service("http", tmp_path)
    cleanup.callback(service.close)
    one = make_engine(service.address, env={"MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "1"})
    os.kill(one.pid, signal.SIGSTOP)
    mine = entry(service, one)
    assert service.backend().remove(address_key(one.name), mine)  # as its end of life would
    os.kill(one.pid, signal.SIGCONT)
    wait_until(lambda: entry(service, one) == mine, 5)
