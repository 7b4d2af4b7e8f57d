"""vLLM's own MooncakeStoreConnector, unmodified, on this package: what it saves, what it loads, what it survives."""

import random
import signal
import threading
import time

import pytest

from tests.e2e.servers import BLOCK
from tests.processes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(240)]


def prompt(seed: int, blocks: int) -> list[int]:
    """`blocks` full blocks and a few tokens more."""
    random_ids = random.Random(seed)
    return [random_ids.randrange(2, 1024) for _ in range(blocks * BLOCK + 5)]


def wait_saved(pool, keys: int, limit: float = 15) -> None:
    """Saving goes on behind the answer."""
    wait_until(lambda: pool.metric("master_key_count") >= keys, limit, f"{keys} keys in the pool")


def test_what_one_computes_another_loads(pool, start_either):
    a, b, plain = start_either(pool, a="kv_both", b="kv_both", plain=None)
    first, second = prompt(1, 20), prompt(2, 20)
    alone = [plain.ask(first).token_ids, plain.ask(second).token_ids]
    assert alone[0] != alone[1]

    cold = a.ask(first)
    assert (cold.token_ids, cold.from_pool) == (alone[0], 0)
    wait_saved(pool, 20)
    warm = b.ask(first)
    assert (warm.token_ids, warm.from_pool) == (alone[0], 20 * BLOCK)

    # And the other way round, where the prompt goes on after what is in the pool.
    b.ask(second[: 12 * BLOCK])
    wait_saved(pool, 32)
    longer = a.ask(second)
    assert (longer.token_ids, longer.from_pool) == (alone[1], 12 * BLOCK)


def test_producer_saves_and_consumer_only_loads(pool, start_either):
    producer, consumer = start_either(pool, producer="kv_producer", consumer="kv_consumer")
    first, second = prompt(3, 12), prompt(4, 12)

    computed = consumer.ask(first)
    assert computed.from_pool == 0
    produced = producer.ask(second)
    wait_saved(pool, 12)
    assert pool.metric("master_key_count") == 12, "the consumer's blocks are not saved"
    loaded = consumer.ask(second)
    assert (loaded.token_ids, loaded.from_pool) == (produced.token_ids, 12 * BLOCK)
    assert producer.ask(first).token_ids == computed.token_ids


def test_pool_of_mooncake_up_outlives_the_engine(up, start):
    pool = up()
    a, b = start(pool, a="kv_both", b="kv_both")
    cold = a.ask(prompt(5, 12))
    wait_saved(pool, 12)
    a.signal(signal.SIGKILL)
    warm = b.ask(prompt(5, 12))
    assert (warm.token_ids, warm.from_pool) == (cold.token_ids, 12 * BLOCK)


def test_requests_are_answered_whatever_dies(pool, start):
    a, b = start(pool, a="kv_both", b="kv_both")
    prompts = [prompt(seed, 20) for seed in range(10, 15)]
    expected = [a.ask(ids).token_ids for ids in prompts]
    wait_saved(pool, 100)
    assert b.ask(prompts[0]).from_pool == 20 * BLOCK

    # The master dies while b is answering, and stays away for the next request.
    answers = []
    asking = threading.Thread(target=lambda: answers.append(b.ask(prompts[1])))
    asking.start()
    time.sleep(0.02)
    pool.kill()
    asking.join()
    assert answers[0].token_ids == expected[1]
    began = time.monotonic()
    assert b.ask(prompts[2]).token_ids == expected[2]
    assert time.monotonic() - began < 10

    # It comes back, learns from the segments what they hold, and takes new blocks.
    pool.start()
    wait_saved(pool, 100, limit=30)
    warm = b.ask(prompts[3])
    assert (warm.token_ids, warm.from_pool) == (expected[3], 20 * BLOCK)
    fresh = a.ask(prompt(20, 20))
    wait_saved(pool, 120)
    warm = b.ask(prompt(20, 20))
    assert (warm.token_ids, warm.from_pool) == (fresh.token_ids, 20 * BLOCK)

    # An engine dies, and its segment with it: what others had there is computed again.
    a.signal(signal.SIGKILL)
    assert b.ask(prompts[4]).token_ids == expected[4]
