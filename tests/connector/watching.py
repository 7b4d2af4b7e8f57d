"""What the connector declines, publishes and counts, in an engine without a model: see `engine`.

Runs in the vLLM environment: `python -m tests.connector.watching MODEL SCENARIO`.
"""

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import prometheus_client
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from mooncake.cli.engine_settings import write_pool_config
from mooncake.store import MooncakeDistributedStore
from mooncake.vllm import MooncakeStoreConnector
from tests.connector.engine import BLOCK, BLOCK_BYTES, Engine
from tests.processes import Master, wait_until

PROMPT = list(range(5, 5 + 8 * BLOCK + 3))  # 8 blocks


class Slow:
    """A store whose loads take longer than computing does, or bring nothing."""

    def __init__(self, store: Any, seconds: float = 0.0) -> None:
        self._store = store
        self._seconds = seconds
        self.loses = False

    def get_into_blocks(self, keys, blocks):
        time.sleep(self._seconds)
        if self.loses:
            self._store.batch_remove(keys[1:2], True)
        return self._store.get_into_blocks(keys, blocks)

    def __getattr__(self, name):
        return getattr(self._store, name)


class Losing:
    """A store which loses the last block of the first large load."""

    def __init__(self, store: Any, keys: int) -> None:
        self._store, self._keys, self.lost = store, keys, 0

    def get_into_blocks(self, keys, blocks):
        codes = self._store.get_into_blocks(keys, blocks)
        if len(keys) >= self._keys and not self.lost:
            self.lost = 1
            codes[-1] = -704
        return codes

    def __getattr__(self, name):
        return getattr(self._store, name)


class Scene:
    def __init__(self, model: str, stack: contextlib.ExitStack) -> None:
        self.master = Master()
        stack.callback(self.master.stop)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="watching-")))
        self._config = folder / "pool.json"
        os.environ |= {"MOONCAKE_CONFIG_PATH": str(self._config), "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1"}
        self._model, self._stack = model, stack
        self._count = 0

    def engine(self, *, gives: bool = True, **extra: Any) -> Engine:
        """`gives`: memory to the pool."""
        write_pool_config(self._config, self.master.port, 200 * BLOCK_BYTES if gives else 0)
        engine = Engine(self._model, 60, lookup_budget_ms=5000, **extra)
        self._stack.callback(engine.close)
        return engine

    def answer(self, engine: Engine, prompt: list[int], tokens: int = 1) -> int:
        """How many tokens came from the pool; vLLM's own cache is empty before and after."""
        before = engine.external
        self._count += 1
        engine.add(f"r{self._count}", prompt, tokens)
        self.run(engine)
        assert engine.scheduler.reset_prefix_cache()
        return engine.external - before

    def run(self, engine: Engine) -> None:
        limit = time.monotonic() + 60
        while engine.busy:
            engine.step()
            assert time.monotonic() < limit
            time.sleep(0.0005)

    def admin(self) -> MooncakeDistributedStore:
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", self.master.address) == 0
        self._stack.callback(store.close)
        return store


def statuses(engine: Engine, operation: str) -> Counter:
    """Blocks or tokens of an operation, by status."""
    found: Counter = Counter()
    for stats in engine.stats:
        for record in stats.get(operation, ()):
            found[record["status"]] += record["num_keys"]
    return found


def slow_loads(scene: Scene) -> None:
    """Made until it is known how long they take, then declined, and tried again now and then."""
    engine = scene.engine(decline_slow_loads=True)
    membership = engine.worker._worker._membership
    membership.store = Slow(membership.store, 1.0)
    for first in (1, 2, 3, 5):  # the last one is the prompt
        assert scene.answer(engine, [first, *PROMPT[1:]]) == 0
    loaded = [scene.answer(engine, PROMPT) for _ in range(5)]
    worth = engine.scheduler.connector._watch._worth
    assert loaded == [8 * BLOCK, 0, 0, 0, 0], (loaded, worth._loads._points, worth._computed._points)
    assert statuses(engine, "load_skipped") == {"slower_than_computing": 4 * 8}
    again = [scene.answer(engine, PROMPT) for _ in range(13)]
    assert again.count(8 * BLOCK) == 1, again
    assert statuses(engine, "hit_tokens")["pool"] == 2 * 8 * BLOCK

    willing = scene.engine(decline_slow_loads=False)
    membership = willing.worker._worker._membership
    membership.store = Slow(membership.store, 0.05)
    assert [scene.answer(willing, PROMPT) for _ in range(4)] == [8 * BLOCK] * 4


def events(scene: Scene) -> None:
    engine, other = scene.engine(events=True), scene.engine()
    published: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)

    def of_pool() -> list[Any]:
        found = [event for event in published if getattr(event, "medium", "") == "CPU"]
        published.clear()
        return found

    def hashes(count: int) -> list[Any]:
        engine.add("hashes", PROMPT, 1)
        found = [*map(maybe_convert_block_hash, engine.scheduler.requests["hashes"].block_hashes[:count])]
        engine.abort("hashes")
        return found

    assert scene.answer(engine, PROMPT) == 0
    scene.run(engine)
    stored = of_pool()
    assert all(isinstance(event, BlockStored) for event in stored)
    blocks = hashes(8)
    assert [value for event in stored for value in event.block_hashes] == blocks, (stored, blocks)
    assert [token for event in stored for token in event.token_ids] == PROMPT[: 8 * BLOCK]
    parents = {value: ([None, *blocks])[i] for i, value in enumerate(blocks)}
    assert all(event.parent_block_hash == parents[event.block_hashes[0]] for event in stored)
    assert {event.block_size for event in stored} == {BLOCK}

    # A hit says nothing new; nor does what another engine does.
    assert scene.answer(engine, PROMPT) == 8 * BLOCK
    assert scene.answer(other, PROMPT[: 4 * BLOCK + 1]) == 4 * BLOCK
    assert of_pool() == []

    # A block that is gone is told when it is looked for, one that goes then when it is loaded.
    (sixth,) = [key for key in scene.master.get("/get_all_keys").split() if key.endswith(f"{blocks[5]:016x}")]
    assert scene.admin().batch_remove([sixth], True) == [0]
    assert scene.answer(engine, PROMPT) == 5 * BLOCK
    scene.run(engine)
    told = of_pool()
    assert (type(told[0]), told[0].block_hashes) == (BlockRemoved, [blocks[5]])
    assert [value for event in told[1:] for value in event.block_hashes] == [blocks[5]], "computed, so saved again"
    membership = engine.worker._worker._membership
    membership.store = Slow(membership.store)
    membership.store.loses = True
    scene.answer(engine, PROMPT)
    membership.store.loses = False
    scene.run(engine)
    told = [(type(event), value) for event in of_pool() for value in event.block_hashes]
    assert told == [(BlockRemoved, blocks[1]), (BlockStored, blocks[1])], told
    assert scene.answer(engine, PROMPT) == 8 * BLOCK

    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add("last", PROMPT[:3], 1)
    scene.run(engine)
    assert any(isinstance(event, AllBlocksCleared) for event in published), "vLLM's own"
    rest = {value for event in of_pool() for value in event.block_hashes}
    assert rest == set(blocks)

    assert scene.answer(engine, PROMPT) == 0
    scene.run(engine)
    assert [value for event in of_pool() for value in event.block_hashes] == blocks, "they are saved and told again"


def metrics(scene: Scene) -> None:
    first, second = scene.engine(), scene.engine(gives=False)
    assert scene.answer(first, PROMPT) == 0
    scene.run(first)
    assert scene.answer(second, PROMPT) == 8 * BLOCK
    second.add("a", PROMPT, 40)
    second.step()
    while not second.answers.get("a"):
        second.step()
    second.add("b", PROMPT, 1)  # what `a` has is in vLLM's own cache
    scene.run(second)
    assert second.scheduler.reset_prefix_cache()
    membership = second.worker._worker._membership
    membership.store = Slow(membership.store)
    membership.store.loses = True
    scene.answer(second, PROMPT)
    second.add("end", PROMPT[:3], 1)
    scene.run(second)

    kinds = {each: each for each in (prometheus_client.Counter, prometheus_client.Histogram, prometheus_client.Gauge)}
    made = MooncakeStoreConnector.build_prom_metrics(second.config, kinds, ["engine"], {0: ["0"]})
    for stats in second.stats:
        made.observe(stats, 0)

    def value(name: str, **labels: str) -> float:
        return prometheus_client.REGISTRY.get_sample_value(name, {"engine": "0", **labels}) or 0.0

    hits = "vllm:mooncake_hit_tokens_total"
    assert value(hits, tier="pool", source="same_host") == 2 * 8 * BLOCK, second.stats
    assert value(hits, tier="gpu", source="local") == 8 * BLOCK
    assert value("vllm:mooncake_moved_bytes_total", direction="load") >= 2 * 8 * BLOCK_BYTES
    assert value("vllm:mooncake_gigabytes_per_second_count", direction="load") >= 2
    assert value("vllm:mooncake_waited_seconds_count", what="lookup") >= 3
    assert value("vllm:mooncake_waited_seconds_count", what="load") == 3
    lost = "vllm:mooncake_skipped_blocks_total"
    assert value(lost, direction="load", reason="object_not_found") == 1
    assert value("vllm:mooncake_store_operation_total", operation="load_get", status="ok") >= 2


def restarts(scene: Scene) -> None:
    """Loads of a hybrid model whose last block is lost start anew, in a KV cache with room for little more than them:
    one alone, and one before others that hold blocks and come behind it."""
    for lengths in ((900,), (600, 400), (600, 300, 100)):
        engine = scene.engine(kind="hybrid")
        prompts = [[len(lengths) * 10 + i, *range(5, 5 + length)] for i, length in enumerate(lengths)]
        for prompt in prompts:
            scene.answer(engine, prompt)
        wait_until(lambda: engine.step() or not engine.half.busy(), 30, "the end of saves")  # noqa: B023
        membership = engine.worker._worker._membership
        membership.store = losing = Losing(membership.store, keys=10)
        for i, prompt in enumerate(prompts):
            engine.add(f"again{i}", prompt, 20)
        try:
            scene.run(engine)
        except AssertionError:
            raise AssertionError(engine.describe()) from None
        assert losing.lost == 1, "its load was not made"
        engine.check_idle()


SCENARIOS = {"slow_loads": slow_loads, "events": events, "metrics": metrics, "restarts": restarts}


def main() -> None:
    logging.disable(logging.ERROR)
    with contextlib.ExitStack() as stack:
        SCENARIOS[sys.argv[2]](Scene(sys.argv[1], stack))
    print("done")


if __name__ == "__main__":
    main()
