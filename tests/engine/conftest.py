"""Fixtures: engines of this process and of worker processes, each with registered memory; by cma and by forced tcp."""

import mmap
import select
import threading
import time

import numpy as np
import pytest

from mooncake.engine import TransferEngine
from tests.processes import Worker

MIB = 1 << 20
HOST = "127.0.0.1"

ENGINE = """
import mmap, numpy as np
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
room.madvise(mmap.MADV_HUGEPAGE)
memory = np.frombuffer(room, np.uint8)
base = memory.ctypes.data
assert engine.register_memory(base, size) == 0
result = [f"127.0.0.1:{engine.get_rpc_port()}", base]
"""


class Side:
    """An engine of this process and its registered memory."""

    def __init__(self, size: int) -> None:
        self.engine = TransferEngine()
        assert self.engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
        self.session = f"{HOST}:{self.engine.get_rpc_port()}"
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.madvise(mmap.MADV_HUGEPAGE)
        self.memory = np.frombuffer(room, np.uint8)
        self.base = self.memory.ctypes.data
        assert self.engine.register_memory(self.base, size) == 0


class Target(Worker):
    """A worker with an engine; `session` and `base` are its registered memory's."""

    def __init__(self, size: int, **options):
        super().__init__(**options)
        self.session, self.base = self(ENGINE, size=size)

    def byte(self, offset: int) -> int:
        return self("result = int(memory[offset])", offset=offset)

    def has_answered(self) -> bool:
        return bool(select.select([self._in], [], [], 0)[0])


@pytest.fixture(params=["cma", "tcp"])
def transport(request, monkeypatch):
    """Both ways; processes started by the test take the same one."""
    if request.param == "tcp":
        monkeypatch.setenv("MC_FORCE_TCP", "1")
    else:
        monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    return request.param


@pytest.fixture
def make_side(cleanup):
    """Engines of this process; nothing of them may be left."""
    made = []
    before = _threads()

    def make(size: int = 8 * MIB) -> Side:
        made.append(Side(size))
        return made[-1]

    yield make
    for side in made:
        side.engine._leave()
    end = time.monotonic() + 3
    while _threads() - before:
        assert time.monotonic() < end, "threads of an engine are left"
        time.sleep(0.01)


@pytest.fixture
def make_target(cleanup):
    def make(size: int = 8 * MIB, **options) -> Target:
        target = Target(size, **options)
        cleanup.callback(target.close)
        return target

    return make


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("mooncake-engine")}


def timed(call, *args):
    start = time.monotonic()
    return call(*args), time.monotonic() - start
