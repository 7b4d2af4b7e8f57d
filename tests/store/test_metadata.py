"""Stores with a metadata service: segments are published under their names, which nobody else may have then."""

import ctypes
import json
import os
import signal
import subprocess

import pytest

from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore
from mooncake.transfer.metadata.entries import address_key, memory_key
from tests.conftest import MIB
from tests.processes import BIN, Worker, children, free_port, wait_until

HOST = "127.0.0.1"
SETUP = """
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup(host, metadata, segment, 1 << 20, "tcp", "", master)
result = [code, store.get_hostname()]
"""


@pytest.fixture
def make(master, service, cleanup):
    """(code, store) of a setup in this process."""

    def make(host: str = HOST, segment: int = 8 * MIB, metadata: str | None = None):
        store = MooncakeDistributedStore()
        cleanup.callback(store.close)
        return store.setup(host, metadata or service.address, segment, MIB, "tcp", "", master.address), store

    return make


def test_a_segment_is_published_under_its_name(master, service, make):
    code, store = make()
    assert code == 0
    name, backend = store.get_hostname(), service.backend()
    address = json.loads(backend.get(address_key(name)))
    assert address["ip_or_host_name"] == HOST
    assert json.loads(backend.get(memory_key(name)))["name"] == name
    assert store.put("k", b"v" * 1000) == 0
    (replica,) = store.get_replica_desc("k")
    assert replica.get_memory_descriptor().buffer_descriptor.transport_endpoint == name
    assert json.loads(master.get("/query_key?key=k"))["data"][0]["transport_endpoint_"] == name
    # Readers of either mode reach it.
    for metadata in (service.address, "P2PHANDSHAKE"):
        code, reader = make(segment=0, metadata=metadata)
        assert code == 0
        assert reader.get("k") == b"v" * 1000
        assert reader.get_replica_desc("k")[0].get_memory_descriptor().buffer_descriptor.transport_endpoint == name
    store.close()
    wait_until(lambda: backend.get(address_key(name)) is None, 5)
    assert backend.get(memory_key(name)) is None


def test_the_name_of_a_living_segment(service, make, caplog):
    name = f"{HOST}:{free_port()}"
    code, store = make(name)
    assert code == 0
    for segment in (8 * MIB, 0):
        code, other = make(name, segment)
        assert code == -600
        assert "is the name of a living process" in caplog.text
        assert other.health_check() == 1
        caplog.clear()
    assert store.put("k", b"v") == 0
    store.close()
    assert wait_until(lambda: make(name)[0] == 0, 5)


def test_a_segment_that_was_killed(master, service, make, cleanup):
    """The name of one whose server was killed is free; of one whose engine was killed it is given back."""
    name = f"{HOST}:{free_port()}"
    names = {"host": name, "metadata": service.address, "segment": 8 * MIB, "master": master.address}
    first = Worker()
    cleanup.callback(first.close)
    assert first(SETUP, **names) == [0, name]
    first.kill()
    wait_until(lambda: service.backend().get(address_key(name)) is None, 5)
    second = Worker()
    cleanup.callback(second.close)
    assert second(SETUP, **names) == [0, name]
    for pid in (*children(second.pid), second.pid):
        os.kill(pid, signal.SIGKILL)
    second.process.wait()
    assert service.backend().get(address_key(name))
    code, store = make(name)
    assert code == 0
    assert store.put("k", b"v") == 0
    assert make(segment=0)[1].get("k") == b"v"


@pytest.mark.slow
def test_only_the_service_is_restarted(service, make):
    """U031: old and new segments are used together at once, and are all published again soon."""
    code, old = make()
    assert code == 0
    assert old.put("a", b"1") == 0
    service.kill()
    assert old.put("b", b"2") == 0
    assert make()[0] == -1
    assert make(f"{HOST}:{free_port()}")[0] == -600
    service.start()
    code, new = make()
    assert code == 0
    assert new.put("c", b"3") == 0
    for store in (old, new):
        assert store.get_batch(["a", "b", "c"]) == [b"1", b"2", b"3"]
    wait_until(lambda: all(service.backend().get(address_key(store.get_hostname())) for store in (old, new)), 8)


def test_mooncake_client(master, service, cleanup):
    port = free_port()
    process = subprocess.Popen(
        [
            BIN / "mooncake_client",
            f"--host={HOST}",
            f"--port={port}",
            f"--master_server_address={master.address}",
            f"--metadata_server={service.address}",
            "--global_segment_size=8MB",
        ],
        stderr=subprocess.DEVNULL,
    )
    cleanup.callback(process.wait)
    cleanup.callback(process.kill)
    name = f"{HOST}:{port}"
    wait_until(lambda: name in master.get("/get_all_segments"))
    assert service.backend().get(address_key(name))
    assert f'"te_endpoint":"{name}"' in master.get("/get_segments_detail")
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0
    assert service.backend().get(address_key(name)) is None


def test_with_a_transfer_engine(master, cleanup):
    """SGLang hands its engine over: the segment has its session's name, and what it has registered counts."""
    engine = TransferEngine()
    assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    session = f"{HOST}:{engine.get_rpc_port()}"
    store = MooncakeDistributedStore()
    cleanup.callback(store.close)
    arguments = (session, "P2PHANDSHAKE", 8 * MIB, MIB, "rdma", "", master.address)
    assert store.setup(*arguments, engine.get_engine()) == 0
    assert store.get_hostname() == session
    memory = ctypes.create_string_buffer(b"0123456789", 1000)
    base = ctypes.addressof(memory)
    assert engine.register_memory(base, 1000) == 0
    assert store.put_from("k", base, 10) == 0
    (replica,) = store.get_replica_desc("k")
    assert replica.get_memory_descriptor().buffer_descriptor.transport_endpoint == session
    assert store.get_into_ranges([base], [["k"]], [[[100]]], [[[2]]], [[[5]]]) == [[[5]]]
    assert memory[100:105] == b"23456"
    assert engine.unregister_memory(base) == 0
    assert store.get_into_ranges([base], [["k"]], [[[100]]], [[[2]]], [[[5]]]) == [[[-600]]]
    assert engine.send_probe(session) == 0
    store.close()
    assert engine.send_probe(session) == 0  # the engine is its owner's
    assert store.setup(*arguments, engine=engine) == 0
    assert store.setup(*arguments, engine=TransferEngine().get_engine()) == -600
    engine._leave()
