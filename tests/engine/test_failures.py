"""Targets die, stop, come back or never answer: every call ends in time with 0 or -1, and nothing is left behind."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from mooncake.engine import TransferEngine
from mooncake.transfer import engine as core
from tests.engine.conftest import HOST, MIB, Side, timed
from tests.processes import free_port, wait_until

LONG = 192 * MIB  # bytes of a transfer that takes a while, 16 times over


def long_lists(side: Side, base: int) -> tuple[list[int], list[int], list[int]]:
    return [side.base] * 16, [base] * 16, [LONG] * 16


def in_the_middle(call) -> tuple[threading.Thread, list]:
    """Start `call` in a thread; what it returns and how long it took."""
    results = []
    thread = threading.Thread(target=lambda: results.append(timed(call)))
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive(), "the transfer was too short for this test"
    return thread, results


def descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("op", ["write", "read"])
def test_target_killed_in_mid_transfer(transport, make_side, make_target, op):
    side, target = make_side(LONG), make_target(LONG)
    call = getattr(side.engine, f"batch_transfer_sync_{op}")
    thread, results = in_the_middle(lambda: call(target.session, *long_lists(side, target.base)))
    target.kill()
    thread.join()
    ((code, took),) = results
    assert code == -1
    assert took < 5
    code, took = timed(call, target.session, *long_lists(side, target.base))
    assert code == -1
    assert took < 0.5  # refused at once


def test_target_stopped(transport, make_side, make_target):
    side, target = make_side(LONG), make_target(LONG)
    call = side.engine.batch_transfer_sync_write
    thread, results = in_the_middle(lambda: call(target.session, *long_lists(side, target.base)))
    target.signal(signal.SIGSTOP)
    thread.join()
    ((code, took),) = results
    assert took < 8.5  # 5 s of silence, after what the kernel's buffers took
    assert code == (0 if transport == "cma" else -1)  # who copies by cma needs nothing of it
    target.signal(signal.SIGCONT)
    wait_until(lambda: side.engine.transfer_sync_write(target.session, side.base, target.base, MIB) == 0, 3)


def test_initiator_killed_in_mid_transfer(transport, make_side, make_target):
    """The target's memory can be unregistered at once, and its descriptors come back by themselves."""
    side, other = make_side(LONG), make_target(LONG)
    wait_until(lambda: side.engine.send_probe(side.session) == 0)
    before = descriptors()
    other.send(
        "engine.batch_transfer_sync_write(session, [base] * 90, [where] * 90, [size] * 90)",
        session=side.session,
        where=side.base,
        size=LONG,
    )
    wait_until(lambda: side.memory[0] == 0 and descriptors() > before)
    time.sleep(0.1)
    other.kill()
    code, took = timed(side.engine.unregister_memory, side.base)
    assert code == 0
    assert took < 3
    wait_until(lambda: descriptors() <= before, 3, "descriptors are back")


def test_target_restarted_under_the_same_address(transport, make_side, make_target):
    port = free_port()
    side = make_side()
    same = {"MC_MIN_RPC_PORT": str(port), "MC_MAX_RPC_PORT": str(port)}
    first = make_target(env=same)
    side.memory[:] = 5
    assert side.engine.transfer_sync_write(first.session, side.base, first.base, MIB) == 0
    first.kill()
    assert side.engine.transfer_sync_write(first.session, side.base, first.base, MIB) == -1
    second = make_target(env=same)
    assert second.session == first.session
    code, took = timed(side.engine.transfer_sync_write, second.session, side.base, second.base, MIB)
    assert code == 0
    assert took < 1
    assert second.byte(MIB - 1) == 5
    # And once more, without a failed call in between: the streams had been idle.
    second.kill()
    third = make_target(env=same)
    assert side.engine.transfer_sync_read(third.session, side.base, third.base, MIB) == 0
    assert side.memory[0] == 0


def test_streams_that_were_closed_while_idle(make_side, make_target, monkeypatch):
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    side, target = make_side(), make_target()
    for _ in range(2):
        assert side.engine.transfer_sync_write(target.session, side.base, target.base, MIB) == 0
        target("""
import socket
for stream in list(engine._engine._endpoint._streams.values()):
    stream.shutdown(socket.SHUT_RDWR)
""")
        code, took = timed(side.engine.transfer_sync_read, target.session, side.base, target.base, MIB)
        assert code == 0
        assert took < 1


def test_peers_that_refuse_or_say_nothing(make_side):
    side = make_side()
    code, took = timed(side.engine.transfer_sync_write, f"{HOST}:{free_port()}", side.base, side.base, 1)
    assert code == -1
    assert took < 0.5
    with socket.create_server((HOST, 0)) as silent:  # accepts (the kernel does), and never answers
        name = f"{HOST}:{silent.getsockname()[1]}"
        for call, args in (
            (side.engine.transfer_sync_write, (name, side.base, side.base, 1)),
            (side.engine.batch_transfer_async_write, (name, [side.base], [side.base], [1])),
            (side.engine.send_probe, (name,)),
        ):
            code, took = timed(call, *args)
            assert code in (-1, 0, -102)
            assert took < 3
        assert side.engine.send_probe(name) == -102


def test_garbage_on_the_port(make_side):
    side = make_side()
    before = descriptors()
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"\xff" * 100, (8).to_bytes(8, "little") + b"\x01{}"):
        stream = socket.create_connection((HOST, side.engine.get_rpc_port()))
        with stream, contextlib.suppress(OSError):  # it may have closed already
            stream.sendall(data)
            stream.shutdown(socket.SHUT_WR)
            assert stream.recv(100) == b""
    wait_until(lambda: descriptors() == before)
    assert side.engine.send_probe(side.session) == 0


def test_where_the_kernel_forbids_cma(make_side, make_target, monkeypatch):
    """Another user's process may not be copied from: tcp, one log line, and a counter."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    side, other = make_side(), make_target()
    got = other(
        """
import logging, os
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("mooncake.engine").addHandler(Lines())
os.setuid(65534)
memory[:] = 4
codes = [engine.transfer_sync_write(session, base, where, 1 << 20) for _ in range(3)]
result = [codes, engine.transfer_stats(), lines]
""",
        session=side.session,
        where=side.base,
    )
    codes, stats, lines = got
    assert codes == [0, 0, 0]
    assert stats == {"cma": 0, "tcp": 3 * MIB, "cma_refused": 1}
    assert len(lines) == 1
    assert "not permitted" in lines[0]
    assert side.memory[MIB - 1] == 4


def test_a_pid_that_is_another_process_now(make_side, make_target, monkeypatch):
    """A handshake that names a process which is not the one it was is not believed."""
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    side, target = make_side(), make_target()
    for change in ("pid = 1", "start = 5", "fd = 0", "address = base"):
        target(f"""
endpoint = engine._engine._endpoint
honest = getattr(endpoint, "honest", None) or endpoint._open
endpoint.honest = honest
def lie(message):
    opened = honest(message)
    pid, start, fd, address = opened.pid, opened.start, opened.table_fd, opened.table_address
    {change}
    opened.pid, opened.start, opened.table_fd, opened.table_address = pid, start, fd, address
    return opened
endpoint._open = lie
memory[:4096] = 1
""")
        fresh = make_side()
        assert fresh.engine.transfer_sync_read(target.session, fresh.base, target.base, 4096) == 0
        assert fresh.memory[4095] == 1
        assert fresh.engine.transfer_stats() == {"cma": 0, "tcp": 4096, "cma_refused": 1}
        fresh.engine._leave()
    assert target("result = bool((memory[:4096] == 1).all())"), "a probe wrote where it had not looked"
    assert side.engine.send_probe(target.session) == 0


def test_many_initiators_that_are_killed(transport, make_side, make_target):
    """U062, and a forked child: its copy of the engine is dead with a clear error, a new one works."""
    side, parent = make_side(), make_target()
    assert side.engine.transfer_sync_write(side.session, side.base, side.base + MIB, 8) == 0
    time.sleep(0.05)
    before = descriptors()
    outcome = parent(
        """
import os, signal
outcome = []
for i in range(count):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = b"?"
        try:
            engine.transfer_sync_write(session, base, where, 8)
        except RuntimeError as error:
            said = b"refused" if "forked child" in str(error) else b"other"
        mine = TransferEngine()
        code = mine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        code = code or mine.transfer_sync_write(session, base, where, 8)
        os.write(write, said + b" %d" % code)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    outcome.append(os.read(read, 100).decode())
    os.close(read)
    os.waitpid(pid, 0)
result = [sorted(set(outcome)), engine.transfer_sync_write(session, base, where, 8)]
""",
        session=side.session,
        where=side.base,
        count=60,
    )
    assert outcome == [["refused 0"], 0]
    parent.kill()
    wait_until(lambda: descriptors() <= before, 3, "descriptors are back")
    assert threading.active_count() < 30


def test_a_forked_child_lets_the_port_go(make_target):
    """Else a restarted engine could not listen there, and peers would wait for a process that never answers."""
    target = make_target()
    child = target("""
import os, time
pid = os.fork()
if pid == 0:
    time.sleep(60)
    os._exit(0)
result = pid
""")
    try:
        port = int(target.session.rpartition(":")[2])
        target.kill()
        wait_until(lambda: socket.socket().connect_ex((HOST, port)) != 0, 2)
    finally:
        os.kill(child, signal.SIGKILL)


def test_nothing_is_left(transport):
    gc.collect()
    threads, before = threading.active_count(), descriptors()
    for _ in range(3):
        side = Side(MIB)
        session = side.session
        assert side.engine.transfer_sync_write(session, side.base, side.base, 100) == 0
        number = side.engine.transfer_submit_write(session, side.base, side.base, 100)
        assert side.engine.get_batch_transfer_status([number]) == 0
        del side
        gc.collect()
    wait_until(lambda: threading.active_count() <= threads, 3, "threads are gone")
    assert descriptors() <= before + 1 + len(os.sched_getaffinity(0))  # staging buffers go with their threads
    assert TransferEngine().send_probe(session) == -1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, int(session.rpartition(":")[2])))


@pytest.mark.parametrize("ending", ["pass", "del engine", "import os; os._exit(0)"])
def test_exit_without_close(ending):
    code = f"""
from mooncake.engine import TransferEngine
from mooncake.transfer import engine as core
import numpy as np
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = np.zeros(1 << 20, np.uint8)
assert engine.register_memory(memory.ctypes.data, 1 << 20) == 0
own = "127.0.0.1:%d" % engine.get_rpc_port()
assert engine.transfer_submit_write(own, memory.ctypes.data, memory.ctypes.data, 1 << 20)
{ending}
"""
    run, took = timed(
        lambda: subprocess.run([sys.executable, "-c", code], timeout=20, capture_output=True, check=False)
    )
    assert run.returncode == 0
    assert not run.stderr
    assert took < 5


def test_peers_that_are_gone_are_forgotten(transport, make_side, monkeypatch):
    """Entries of restarted peers do not pile up (U052)."""
    monkeypatch.setattr(core, "KNOWN_PEERS", 5)
    side = make_side()
    gc.collect()
    before = descriptors()
    for _ in range(30):
        other = Side(4096)
        assert side.engine.transfer_sync_write(other.session, side.base, other.base, 4096) == 0
        other.engine._leave()
        time.sleep(0.01)  # its end of the streams is closed
    assert side.engine.transfer_sync_write(side.session, side.base, side.base + MIB, 8) == 0
    assert len(side.engine._engine._peers) <= 6
    assert descriptors() < before + 30
