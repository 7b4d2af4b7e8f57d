"""Fixtures: other projects' packages, each imported once."""

import subprocess

import pytest

from mooncake.store import MooncakeDistributedStore
from tests.clients.processes import Clients, missing
from tests.processes import BIN, free_port, wait_until


@pytest.fixture(scope="session")
def clients(tmp_path_factory):
    clients = Clients(tmp_path_factory.mktemp("clients"))
    yield clients
    clients.close()


@pytest.fixture
def sglang(clients):
    return available(clients, "sglang")


@pytest.fixture
def lmcache(clients):
    return available(clients, "lmcache")


def available(clients: Clients, package: str) -> Clients:
    if reason := missing(package):
        pytest.skip(reason)
    return clients


@pytest.fixture
def mooncake_client(master, cleanup) -> str:
    """The address of one with 64 MB."""
    address = f"127.0.0.1:{free_port()}"
    argv = [
        BIN / "mooncake_client",
        "--host=127.0.0.1",
        f"--port={address.rpartition(':')[2]}",
        "--global_segment_size=64MB",
        f"--master_server_address={master.address}",
    ]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cleanup.callback(process.wait)
    cleanup.callback(process.kill)
    probe = MooncakeDistributedStore()
    wait_until(lambda: probe.setup_dummy(0, 0, address) == 0, limit=20, what="the desk")
    probe.close()
    return address
