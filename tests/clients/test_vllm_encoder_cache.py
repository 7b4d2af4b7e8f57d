"""vLLM's encoder caches keep and hand over embeddings by our store and engine; see vllm_encoder_cache.py."""

import json

import pytest

from tests.processes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(120)]

MODULE = "vllm_encoder_cache"


@pytest.fixture
def pool(master, tmp_path) -> dict[str, str]:
    """What names it to vLLM: every process gives it 32 MB."""
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master.address,
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": "32MB",
        "local_buffer_size": "16MB",
    }
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(config))
    return {"MOONCAKE_CONFIG_PATH": str(path), "VLLM_HOST_IP": "127.0.0.1"}


def test_store_client(clients, pool):
    assert clients.run(f"{MODULE}.store_client", pool) == {
        "none": [False] * 5,
        "all": [True] * 5,
        "same": True,
        "wrong": [],
        "refused": "embedding tensor must be contiguous",
        "healthy": True,
    }


def test_full_pool(clients, pool):
    result = clients.run(f"{MODULE}.full_pool", pool)
    assert result == {"stored": True, "healthy": True, "then": True}


def test_master_dies_and_comes_back(clients, master, pool, tmp_path):
    starts = tmp_path / "starts"
    running = clients.start(f"{MODULE}.without_master", pool, master=master.process.pid, master_starts=str(starts))
    wait_until(starts.exists, 30, "the death of the master")
    master.process.wait()
    master.start()
    assert running.result() == {"meanwhile": [False, "refused", 0], "same": True, "healthy": True}


def test_publisher(clients, pool):
    assert clients.run(f"{MODULE}.publisher", pool) == {
        "cold": [],
        "warm": ["image-21", "image-22"],
        "same": True,
        "unasked": False,
    }


@pytest.mark.parametrize("route", [{}, {"MC_FORCE_TCP": "1"}], ids=["same host", "tcp"])
def test_encoder_writes_into_prefill(clients, tmp_path, route):
    reply = str(tmp_path / "reply")
    consumer = clients.start(f"{MODULE}.consumer", route, reply=reply)
    producer = clients.start(f"{MODULE}.producer", route, reply=reply)
    assert producer.result() == {"acquired": 2, "released": [True, True], "beyond": "status -1", "left": 0}
    assert consumer.result() == {
        "registered": 0,
        "same": [True] * 3,
        "given back": True,
        "twice": False,
        "resident": True,
    }
