"""Memory that has been unregistered is not touched any more, whoever was copying; what is registered anew is found."""

import hashlib
import signal
import threading
import time

import pytest

from mooncake.transfer import regions
from tests.engine.conftest import MIB, timed
from tests.processes import wait_until

LONG = 192 * MIB
WRITING = """
import random
memory[:] = 1
offsets = random.Random(1).sample(range(0, size, piece), size // piece) if piece < size else [0] * 8
lists = [base + at for at in offsets], [where + at for at in offsets], [piece] * len(offsets)
codes = []
while not codes or codes[-1] == 0:
    codes.append(engine.batch_transfer_sync_write(session, *lists))
result = [len(codes), codes[-1], engine.transfer_sync_write(session, base, where, 1)]
"""


def state(side) -> str:
    return hashlib.blake2b(side.memory).hexdigest()


@pytest.mark.parametrize("piece", [LONG, 16384])
def test_no_byte_comes_later(transport, make_side, make_target, piece):
    side, writer = make_side(LONG), make_target(LONG)
    writer.send(WRITING, session=side.session, where=side.base, size=LONG, piece=piece)
    wait_until(lambda: side.memory[0] == 1)
    time.sleep(0.3)
    code, took = timed(side.engine.unregister_memory, side.base)
    side.memory[:] = 0
    before = state(side)
    assert code == 0
    assert took < 3
    assert writer.receive()[1:] == [-1, -1]
    assert state(side) == before
    assert side.engine.register_memory(side.base, LONG) == 0
    assert writer("result = engine.transfer_sync_write(session, base, where, 5)") == 0
    assert side.memory[4] == 1


def test_a_stopped_copier_is_told_of_and_shut_out(make_side, make_target, monkeypatch):
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.setattr(regions, "COPY_LIMIT", 0.5)
    side, writer = make_side(LONG), make_target(LONG)
    for _ in range(5):
        writer.send(WRITING, session=side.session, where=side.base, size=LONG, piece=LONG)
        wait_until(lambda: side.memory[0] == 1)
        time.sleep(0.2)
        writer.signal(signal.SIGSTOP)
        time.sleep(0.2)
        code, took = timed(side.engine.unregister_memory, side.base)
        assert took < 2
        side.memory[:] = 0
        writer.signal(signal.SIGCONT)
        assert writer.receive()[1:] == [-1, -1]
        assert side.memory.max() == 0  # it was stopped after a system call, and began no other
        assert side.engine.register_memory(side.base, LONG) == 0
        if code:
            break
    assert code == -4
    assert writer("result = engine.transfer_sync_write(session, base, where, 5)") == 0  # with a new slot
    assert side.engine.unregister_memory(side.base) == 0


WRITING_ONCE = """
memory[:] = 1
result = engine.batch_transfer_sync_write(session, [base], [where], [size])
"""


def test_what_is_under_way_is_over_once_it_has_settled(transport, make_side, make_target):
    """The memory stays registered; what is written to other parts of it goes on."""
    side, writer = make_side(LONG), make_target(LONG)
    writer.send(WRITING_ONCE, session=side.session, where=side.base, size=LONG)
    wait_until(lambda: side.memory[0] == 1)
    took = timed(side.engine._engine.regions.settle, [(side.base, side.base + LONG)])[1]
    before = state(side)
    assert took < 5
    writer.receive()  # its code: -1 if its stream was cut
    assert state(side) == before
    assert writer("result = engine.transfer_sync_write(session, base, where, 5)") == 0


def test_only_what_was_unregistered_is_lost(transport, make_side, make_target):
    side, target = make_side(), make_target()
    write, base = side.engine.transfer_sync_write, target.base
    register = (
        "result = [engine.unregister_memory(base), engine.batch_register_memory([base, base + half], [half, half])]"
    )
    assert target(register, half=4 * MIB) == [0, 0]
    assert write(target.session, side.base, base, 4 * MIB) == 0
    assert write(target.session, side.base, base + 4 * MIB, 4 * MIB) == 0
    assert target("result = engine.unregister_memory(base)") == 0
    assert write(target.session, side.base, base, 1) == -1
    assert write(target.session, side.base, base + 4 * MIB, 1) == 0
    assert side.engine.batch_transfer_sync_write(target.session, [side.base] * 2, [base + 4 * MIB, base], [1, 1]) == -1
    assert target("result = engine.register_memory(base, 10)") == 0
    assert write(target.session, side.base, base, 10) == 0
    assert write(target.session, side.base, base, 11) == -1


def test_registering_while_others_transfer(transport, make_side, make_target):
    """Tables change under the copiers' hands a thousand times; what stays registered can be used all the time."""
    side, target = make_side(), make_target()
    target.send("""
import threading
stop = False
other = np.zeros(1 << 16, np.uint8)
address = other.ctypes.data
def change():
    while not stop:
        for i in range(0, 1 << 16, 4096):
            assert engine.register_memory(address + i, 4096) == 0
        assert engine.batch_unregister_memory(list(range(address, address + (1 << 16), 4096))) == 0
thread = threading.Thread(target=change)
thread.start()
""")
    target.receive()
    end = time.monotonic() + 0.8
    codes = []

    def work():
        while time.monotonic() < end:
            codes.append(
                side.engine.batch_transfer_sync_write(
                    target.session, [side.base] * 20, [target.base + i * 4096 for i in range(20)], [4096] * 20
                )
            )

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    target("stop = True; thread.join()")
    assert len(codes) > 20
    assert set(codes) == {0}


@pytest.mark.parametrize("op", ["write", "read"])
def test_memory_that_was_unmapped_without_a_word(transport, make_side, make_target, op):
    """The owner forgot to unregister it: an error for both, and nobody crashes."""
    side, target = make_side(), make_target()
    hole = target("""
import ctypes
hole = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(hole))
assert engine.register_memory(address, 1 << 20) == 0
ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), 1 << 20, 0)  # as if unmapped, but nothing else gets there
result = address
""")
    call = getattr(side.engine, f"batch_transfer_sync_{op}")
    assert call(target.session, [side.base], [hole], [1 << 20]) == -1
    assert call(target.session, [side.base] * 3, [hole, hole + 8192, target.base], [4096] * 3) == -1
    assert call(target.session, [side.base], [target.base], [1 << 20]) == 0
    assert target("result = engine.unregister_memory(address)") == 0
