"""Real vLLM instances publish KV events; the indexer follows them, and the proxy routes by what it knows."""

import json
import random

import pytest

from mooncake.cli.engine_settings import own_store_config, pool_environment
from mooncake.cli.loopback import free_ports
from tests.e2e.servers import BLOCK, Server
from tests.events.indexer import Conductor
from tests.processes import wait_until
from tests.proxy.processes import Proxy

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(240)]


def _prompt(seed: int, blocks: int) -> list[int]:
    random_ids = random.Random(seed)
    return [random_ids.randrange(2, 1024) for _ in range(blocks * BLOCK + 5)]


def test_indexer_and_proxy_follow_vllm(pool, zygote, model, tmp_path, cleanup):
    conductor = Conductor()
    cleanup.callback(conductor.stop)
    servers = []
    for name in ("a", "b"):
        port, replay = free_ports(2)
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://*:{replay}",
        }
        transfer = own_store_config("kv_both", decline_slow_loads=False) if name == "a" else ""
        environment = {**pool_environment(pool.config), "VLLM_SERVER_DEV_MODE": "1"}
        server = Server(zygote, name, model, tmp_path, transfer, environment, "--kv-events-config", json.dumps(events))
        cleanup.callback(server.stop)
        servers.append(server)
        status, answer = conductor.post(
            "/register",
            endpoint=f"tcp://127.0.0.1:{port}",
            replay_endpoint=f"tcp://127.0.0.1:{replay}",
            type="vLLM",
            modelname="tiny",
            instance_id=server.url,
            block_size=BLOCK,
        )
        assert status == 200, answer
    for server in servers:
        server.wait_ready()
    a, b = servers
    wait_until(lambda: all(one["connected"] for one in conductor.instances()), 20, "the connections")

    def known(prompt: list[int]) -> dict:
        found = conductor.query(prompt, model="tiny")
        return {one.log.stem: [found[one.url][what] // BLOCK for what in ("GPU", "CPU")] for one in servers}

    first, second = _prompt(1, 20), _prompt(2, 12)
    cold = a.ask(first)
    b.ask(second)
    wait_until(lambda: known(first) == {"a": [20, 20], "b": [0, 0]}, 20, "the first prompt's blocks")
    wait_until(lambda: known(second) == {"a": [0, 0], "b": [12, 0]}, 20, "the second prompt's blocks")
    assert conductor.query(first, model="tiny", instance_id=a.url)[a.url]["longest_matched"] == 20 * BLOCK

    proxy = Proxy("--policy=prefix_affinity", f"--indexer={conductor.url}", "--indexer-timeout=5", decode=servers)
    cleanup.callback(proxy.stop)
    for server, prompt in ((a, first), (b, second), (a, first), (b, second)):
        before = proxy.instance(server)["served"]
        status, _, answer = proxy.ask({"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0})
        assert status == 200, answer
        assert proxy.instance(server)["served"] == before + 1

    assert a.post("/reset_prefix_cache") == 200  # its own cache, not the pool; told with the next step
    a.ask(_prompt(3, 2))
    wait_until(lambda: known(first)["a"] == [0, 20], 20, "the clearing")
    assert a.ask(first).token_ids == cold.token_ids
    wait_until(lambda: known(first)["a"][0] > 0, 20, "blocks that were loaded")
    told = conductor.instance(a.url)
    assert (told["gaps"], told["misread"], told["unlinked"]) == (0, 0, 0)
