"""Fixtures: a master with the SSD tier on, and stores and workers whose segment servers have a disk."""

import pytest

from mooncake.store import MooncakeDistributedStore
from tests.processes import Worker, wait_until

MIB = 1 << 20

DISK_SETUP = """
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
store = MooncakeDistributedStore()
result = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", master, None, True, path)
"""


def pattern(key: str, size: int) -> bytes:
    """Bytes that no other key has, and that differ from block to block."""
    unit = (key.encode() + b"|" + str(size).encode() + b"|").ljust(61, b"#")
    return (unit * (size // len(unit) + 1))[:size]


def put_all(store, values: dict[str, bytes], **how) -> None:
    """Put, and again while there is no room: the disk may be slower than we are."""
    for key, value in values.items():
        wait_until(lambda k=key, v=value: store.put(k, v, **how) == 0, 20, f"a put of {key}")


def settled(master) -> bool:
    """Whether nothing waits to be written."""
    return master.metric("mooncake_offload_queue") == 0


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "ssd"
    path.mkdir()
    return path


@pytest.fixture
def make_disk_store(disk, cleanup):
    """A store of this process whose segment server keeps values in `disk`."""

    def make(master, segment: int = 32 * MIB, path=disk, wait: bool = True):
        store = MooncakeDistributedStore()
        before = _tiers(master) if wait else 0
        code = store.setup(
            "127.0.0.1", "P2PHANDSHAKE", segment, 64 * MIB, "tcp", "", master.address, None, True, str(path)
        )
        assert code == 0
        cleanup.callback(store.close)
        if wait:
            wait_until(lambda: _tiers(master) > before, what="the tier")
        return store

    return make


@pytest.fixture
def make_disk_worker(disk, cleanup):
    """A worker process with such a store in the variable `store`."""

    def make(master, segment: int = 32 * MIB, path=disk, wait: bool = True, **options):
        worker = Worker(**options)
        cleanup.callback(worker.close)
        before = _tiers(master) if wait else 0
        assert worker(DISK_SETUP, segment=segment, path=str(path), master=master.address) == 0
        if wait:
            wait_until(lambda: _tiers(master) > before, what="the tier")
        return worker

    return make


def _tiers(master) -> float:
    return master.metric("mooncake_disk_tiers")
