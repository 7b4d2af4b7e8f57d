"""This package's own MooncakeStoreConnector in real vLLM instances."""

import json
import random
import re
import signal
import threading
import time

import pytest

from mooncake.cli.engine_settings import own_store_config
from mooncake.cli.loopback import fetch
from mooncake.store import MooncakeDistributedStore
from tests.e2e.servers import BLOCK
from tests.e2e.test_vllm_store import prompt, wait_saved
from tests.processes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(240)]


def operations(server, operation: str) -> dict[str, float]:
    """vLLM's counters of an operation on the store that went well."""
    found = re.findall(
        rf'^vllm:mooncake_store_operation_(\w*total){{.*operation="{operation}",status="ok".*}} (\S+)',
        fetch(server.port, "/metrics", timeout=10),
        re.MULTILINE,
    )
    return {name: float(value) for name, value in found}


def test_a_hit_is_told_in_metrics_and_log(pool, start_own):
    a, b = start_own(pool, a="kv_both", b="kv_both")
    cold = a.ask(prompt(1, 20))
    wait_saved(pool, 20)
    warm = b.ask(prompt(1, 20))
    assert (warm.token_ids, warm.from_pool) == (cold.token_ids, 20 * BLOCK)
    assert operations(a, "save_put")["keys_total"] >= 20
    assert operations(b, "load_get")["keys_total"] == 20
    assert operations(b, "load_get")["bytes_total"] == 20 * BLOCK * 4096
    assert operations(b, "lookup_exists")["total"] >= 1
    assert f"from_pool={20 * BLOCK} " in b.log.read_text()
    assert f"loaded={20 * BLOCK} tokens in " in b.log.read_text()
    assert b.metric("vllm:mooncake_hit_tokens_total", tier="pool") == 20 * BLOCK
    assert b.metric("vllm:mooncake_waited_seconds_count", what="load") == 1
    assert b.metric("vllm:mooncake_moved_bytes_total", direction="load") == 20 * BLOCK * 4096
    assert b.metric("vllm:mooncake_identity_info") == 1


def test_multi_connector_and_decoded_tokens(pool, start_own):
    """Inside vLLM's MultiConnector, with blocks that an answer fills saved as well: a second turn hits them."""
    inner = json.loads(
        own_store_config("kv_both", save_decode_cache=True, lookup_budget_ms=2000, decline_slow_loads=False)
    )
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [inner]},
    }
    a, b = start_own(pool, a=json.dumps(multi), b=json.dumps(multi))
    first = a.ask(prompt(6, 8), tokens=100)
    blocks = (8 * BLOCK + 5 + 99) // BLOCK
    wait_saved(pool, blocks)
    turn = [*prompt(6, 8), *first.token_ids, *prompt(7, 1)]
    expected = a.ask(turn)
    again = b.ask(turn)
    assert again.token_ids == expected.token_ids
    assert again.from_pool >= blocks * BLOCK
    assert b.metric("vllm:mooncake_hit_tokens_total", tier="pool") >= blocks * BLOCK


def test_requests_are_answered_whatever_dies(pool, start_own):
    """With vLLM's default policy for failed loads, which fails the request."""
    a, b = start_own(pool, a="kv_both", b="kv_both")
    prompts = [prompt(seed, 20) for seed in range(10, 18)]
    expected = [a.ask(ids).token_ids for ids in prompts]
    wait_saved(pool, 160)
    assert b.ask(prompts[0]).from_pool == 20 * BLOCK

    # Blocks that are there when asked for, and gone when they are loaded: the rest is computed.
    keys = pool.get("/get_all_keys").split()
    assert len(keys) == 160
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", pool.address) == 0
    stop = threading.Event()

    def remove() -> None:
        shuffled = random.Random(1).sample(keys, len(keys))
        while not stop.wait(0.001) and shuffled:
            store.remove(shuffled.pop(), force=True)

    removing = threading.Thread(target=remove)
    removing.start()
    for ids, tokens in zip(prompts[1:4], expected[1:4], strict=True):
        assert b.ask(ids).token_ids == tokens
    stop.set()
    removing.join()

    # The pool is emptied.
    assert store.remove_all(force=True) >= 0
    assert b.ask(prompts[4]).token_ids == expected[4]
    store.close()

    # The master dies while b is answering, and stays away for the next request.
    answers = []
    asking = threading.Thread(target=lambda: answers.append(b.ask(prompts[5])))
    asking.start()
    time.sleep(0.02)
    pool.kill()
    asking.join()
    assert answers[0].token_ids == expected[5]
    assert b.ask(prompts[6]).token_ids == expected[6]

    # It comes back, learns from the segments what they hold, and takes new blocks.
    pool.start()
    held = 20
    wait_saved(pool, held, limit=30)
    fresh = a.ask(prompt(30, 20))
    wait_saved(pool, held + 20, limit=30)
    warm = b.ask(prompt(30, 20))
    assert (warm.token_ids, warm.from_pool) == (fresh.token_ids, 20 * BLOCK)

    # An engine dies, and its segment with it: what others had there is computed again.
    a.signal(signal.SIGKILL)
    assert b.ask(prompts[7]).token_ids == expected[7]


def test_a_master_that_hangs_costs_a_new_request_its_budget(pool, start_own):
    (a,) = start_own(pool, a="kv_both")
    a.ask(prompt(60, 20))
    began = time.monotonic()
    a.ask(prompt(61, 20))
    usual = time.monotonic() - began
    pool.signal(signal.SIGSTOP)
    for seed in range(62, 66):
        began = time.monotonic()
        a.ask(prompt(seed, 20))
        assert time.monotonic() - began < 2 * usual + 0.8  # vLLM's own connector: seconds
    pool.signal(signal.SIGCONT)


def test_an_engine_starts_without_the_master_and_joins_later(pool, start_own):
    pool.kill()
    (a,) = start_own(pool, a="kv_both")
    first = a.ask(prompt(40, 12))
    pool.start()
    wait_until(lambda: "has been joined" in a.log.read_text() or pool.metric("master_total_capacity_bytes"), 30)
    (b,) = start_own(pool, b="kv_both")
    a.ask(prompt(41, 12))
    wait_saved(pool, 12)
    assert b.ask(prompt(41, 12)).from_pool == 12 * BLOCK
    assert b.ask(prompt(40, 12)).token_ids == first.token_ids


def test_reset_removes_this_model_only(pool, start_own):
    a, other = start_own(pool, a="kv_both", other=own_store_config("kv_both", cache_prefix="other"))
    a.ask(prompt(50, 6))
    wait_saved(pool, 6)
    assert other.ask(prompt(50, 6)).from_pool == 0  # what differs never hits
    wait_saved(pool, 12)
    wait_until(lambda: a.post("/reset_prefix_cache?reset_external=true") == 200, 10)
    wait_until(lambda: pool.metric("master_key_count") == 6, 10)
