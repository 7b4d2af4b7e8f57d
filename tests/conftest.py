"""Fixtures: a master, stores of this process, and worker processes, all gone when the test is over."""

import contextlib

import pytest

from mooncake.store import MooncakeDistributedStore
from tests.engine.services import EACH_KIND, start_service
from tests.processes import SETUP, Master, Worker

MIB = 1 << 20


@pytest.fixture
def cleanup():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def make_master(cleanup):
    def make(*flags: str, **options) -> Master:
        master = Master(*flags, **options)
        cleanup.callback(master.stop)
        return master

    return make


@pytest.fixture
def master(make_master):
    return make_master()


@pytest.fixture
def make_store(master, cleanup):
    """A store of this process; `segment` bytes contributed."""

    def make(segment: int = 64 * MIB, buffer: int = 32 * MIB, host: str = "127.0.0.1", at: Master | None = None):
        store = MooncakeDistributedStore()
        assert store.setup(host, "P2PHANDSHAKE", segment, buffer, "tcp", "", (at or master).address) == 0
        cleanup.callback(store.close)
        return store

    return make


@pytest.fixture
def store(make_store):
    return make_store()


@pytest.fixture
def make_worker(master, cleanup):
    """A worker process with a store of its own in the variable `store`."""

    def make(segment: int = 0, buffer: int = 32 * MIB, host: str = "127.0.0.1", at: Master | None = None, **options):
        worker = Worker(**options)
        cleanup.callback(worker.close)
        code = worker(SETUP, host=host, segment=segment, buffer=buffer, master=(at or master).address)
        assert code == 0, f"setup returned {code}"
        return worker

    return make


@pytest.fixture(params=EACH_KIND)
def service(request, cleanup, tmp_path):
    """A metadata service of each kind."""
    made = start_service(request.param, tmp_path)
    cleanup.callback(made.close)
    return made
