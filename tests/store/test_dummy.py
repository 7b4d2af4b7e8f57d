"""setup_dummy against a real `mooncake_client`, and the memory that goes with it."""

import ctypes
import subprocess

import numpy as np
import pytest

from mooncake.store import (
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
    get_alloc_func_addr,
    get_free_func_addr,
)
from tests.processes import BIN, free_port, wait_until

MIB = 1 << 20


@pytest.fixture
def start_client(master, cleanup):
    """A `mooncake_client` of 64 MiB; its port."""

    def start(*flags: str) -> int:
        port = free_port()
        argv = [
            BIN / "mooncake_client", "--host=127.0.0.1", f"--port={port}", "--global_segment_size=64MB",
            f"--master_server_address={master.address}", *flags,
        ]  # fmt: skip
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        cleanup.callback(process.wait)
        cleanup.callback(process.kill)
        probe = MooncakeDistributedStore()
        wait_until(lambda: probe.setup_dummy(0, 0, f"127.0.0.1:{port}") == 0, limit=20, what="the desk")
        probe.close()
        return port

    return start


@pytest.fixture
def dummy(start_client, cleanup):
    store = MooncakeDistributedStore()
    assert store.setup_dummy(4 * MIB, 16 * MIB, f"127.0.0.1:{start_client()}") == 0
    cleanup.callback(store.close)
    return store


def test_values_lie_in_the_clients_memory(dummy, make_store):
    assert dummy.health_check() == 0
    assert dummy.put("k", b"value") == 0
    assert dummy.put("big", bytes(17 * MIB)) == -600
    assert dummy.get("k") == bytes(dummy.get_buffer("k")) == b"value"
    other = make_store(segment=0)
    assert other.get("k") == b"value"
    assert dummy.transfer_stats()["shm"] > 0
    dummy.close()
    assert other.get("k") == b"value"  # it belongs to the mooncake_client
    assert dummy.health_check() == 1
    assert dummy.alloc_from_mem_pool(10) != 0  # the memory stays valid


def test_host_memory(dummy):
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(MIB)
    assert dummy.register_buffer(address, MIB) == 0
    assert dummy.register_buffer(address, MIB) == -600
    ctypes.memmove(address, b"hello dummy", 11)
    assert dummy.put_from("k", address, 11) == 0
    assert dummy.get_into("k", address + 100, 100) == 11
    assert ctypes.string_at(address + 100, 11) == b"hello dummy"
    assert dummy.batch_put_from_multi_buffers(["m"], [[address, address + 6]], [[5, 5]]) == [0]
    assert dummy.get("m") == b"hellodummy"
    assert dummy.unregister_buffer(address) == 0
    assert allocator.free(address) == 0
    assert allocator.free(address) == allocator.free(0) == allocator.free(12345) == -1
    with pytest.raises(RuntimeError):
        allocator.alloc(0)


def test_memory_pool(dummy):
    first, second = dummy.alloc_from_mem_pool(1000), dummy.alloc_from_mem_pool(1000)
    assert second - first >= 1000
    assert dummy.alloc_from_mem_pool(4 * MIB) == dummy.alloc_from_mem_pool(0) == 0
    ctypes.memmove(first, b"pool", 4)
    assert dummy.put_from("k", first, 4) == 0
    assert dummy.get("k") == b"pool"
    assert MooncakeDistributedStore().alloc_from_mem_pool(10) == 0


def test_sessions_are_refused(dummy):
    dummy.put("k", b"value")
    assert dummy.batch_put_session_start(["x"], [5]) == [-600]
    assert dummy.batch_put_from_multi_buffer_ranges(["x"], [[1]], [[1]], [[0]]) == [-600]
    assert dummy.batch_put_session_end(["x"]) == dummy.batch_put_session_revoke(["x"]) == [-600]
    assert dummy.batch_get_session_start(["k"]) == [-600]
    assert dummy.batch_get_into_multi_buffer_ranges(["k"], [[1]], [[1]], [[0]]) == [-600]
    assert dummy.batch_get_session_end(["k"]) == -600


def test_addresses_that_lead_nowhere(master):
    store = MooncakeDistributedStore()
    for address in (f"127.0.0.1:{free_port()}", "nonsense", f"127.0.0.1:{master.metrics_port}"):
        assert store.setup_dummy(MIB, MIB, address) == -1
    assert store.health_check() == 1


def test_c_functions():
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(get_alloc_func_addr())
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(get_free_func_addr())
    address = allocate(MIB)
    array = np.ctypeslib.as_array((ctypes.c_uint8 * MIB).from_address(address))
    array[:] = 7
    assert int(array.sum()) == 7 * MIB
    free(address, MIB)
    assert not allocate(0)
