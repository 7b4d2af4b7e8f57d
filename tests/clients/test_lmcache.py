"""LMCache keeps its chunks in our pool with its own connector; see lmcache_pool.py."""

import pytest

from tests.processes import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("save_chunk_meta", "address"),
    [(True, "mooncake_master_server_addr"), (False, "mooncake_master_server_addr"), (False, "master_server_address")],
    ids=["with its description", "bare", "older names in the configuration"],
)
def test_chunks(lmcache, master, save_chunk_meta, address):
    result = lmcache.run("lmcache_pool.remote", master=master.address, save_chunk_meta=save_chunk_meta, address=address)
    assert result == {
        "before": [0] * 5,
        "after": [1] * 4 + [0],
        "found": 4,
        "got": [True] * 4 + [None],
        "zero copy": True,
        "then": [0] * 5,
        "closed": 1,
    }


def test_look_up_client(lmcache, master):
    assert lmcache.run("lmcache_pool.lookup", master=master.address) == {
        "chunks": 3,
        "none": 0,
        "two": 64,
        "other": 0,
    }


def test_servers_read_from_one_another(lmcache, cleanup):
    ports = [free_port(), free_port()]
    server = lmcache.start("lmcache_pool.channel_server", port=ports[0])
    cleanup.callback(server.kill)
    result = lmcache.run("lmcache_pool.channel_reader", port=ports[1], peer=f"127.0.0.1:{ports[0]}")
    assert result == {"done": [True] * 3, "same": True}


def test_the_mode_that_needs_the_cpp_library_says_so(lmcache, master):
    assert "requires the C++ Mooncake extension" in lmcache.run("lmcache_pool.l2_adapter", master=master.address)
