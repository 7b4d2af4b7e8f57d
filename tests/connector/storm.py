"""Random orders of everything that may happen to requests and to the pool, on two engines that share one.

Runs in the vLLM environment: `python -m tests.connector.storm MODEL SEED STEPS [KIND]`.  Prints its counts as JSON.
"""

import contextlib
import ctypes
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from mooncake.cli.engine_settings import write_pool_config
from mooncake.store import MooncakeDistributedStore
from tests.connector.engine import BLOCK_BYTES, Engine, numbers
from tests.connector.kinds import KINDS
from tests.processes import Master, wait_until

POOL_BLOCKS = 60  # of each engine's segment
END_LIMIT = 60.0  # seconds in which everything must come to its end


class Faulty:
    """A store whose batches fail now and then, and then may have left anything in the blocks."""

    def __init__(self, store, random_source, counts):
        self._store, self._random, self._counts = store, random_source, counts

    def get_into_blocks(self, keys, blocks):
        fate = self._random.random()
        if fate < 0.05:
            self._counts["load raised"] += 1
            raise RuntimeError("made to fail")
        time.sleep(self._random.random() * 0.01)
        if 0.2 < fate < 0.3:
            self._counts["evicted before loading"] += 1
            self._store.batch_remove(self._random.sample(keys, (len(keys) + 1) // 2), True)
        codes = self._store.get_into_blocks(keys, blocks)
        self._counts["blocks loaded"] += codes.count(0)
        self._counts["blocks missing"] += sum(code < 0 for code in codes)
        if fate < 0.2:
            spoiled = self._random.randrange(len(codes))
            self._counts["block spoiled"] += 1
            for address, size in zip(*blocks.of([blocks.blocks[spoiled]]), strict=True):
                ctypes.memset(int(address), 0x5A, int(size))
            codes[spoiled] = -704
        return codes

    def put_from_blocks(self, keys, blocks):
        fate = self._random.random()
        time.sleep(self._random.random() * 0.01)
        if fate < 0.05:
            self._counts["save raised"] += 1
            raise RuntimeError("made to fail")
        if fate < 0.08:
            self._counts["save refused"] += 1
            return [-800] * len(keys)
        codes = self._store.put_from_blocks(keys, blocks)
        self._counts["blocks saved"] += codes.count(0)
        return codes

    def read_stats(self):
        return self._store.read_stats()

    def close(self):
        self._store.close()


class Storm:
    def __init__(self, model: str, seed: int, folder: Path, master: Master, kind: str) -> None:
        self.random = random.Random(seed)
        self.counts: Counter = Counter()
        self.master = master
        self.stopped_until = 0.0
        self.down_until = 0.0
        config = folder / "pool.json"
        write_pool_config(config, self.master.port, POOL_BLOCKS * len(KINDS[kind]) * BLOCK_BYTES)
        os.environ["MOONCAKE_CONFIG_PATH"] = str(config)
        os.environ["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"] = "127.0.0.1"
        blocks = 30 + 10 * len(KINDS[kind])
        self.engines = [
            Engine(model, blocks, kind=kind, save_decode_cache=bool(seed % 2), max_pinned_percent=10 + seed % 3 * 20)
            for _ in range(2)
        ]
        for engine in self.engines:
            membership = engine.worker._worker._membership
            membership.store = Faulty(membership.store, self.random, self.counts)
        self.admin = MooncakeDistributedStore()
        assert self.admin.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", self.master.address) == 0
        self.families = [[self.random.randrange(5, 1000) for _ in range(600)] for _ in range(4)]
        self.number = 0
        self.prompts: list[list[int]] = []

    def prompt(self) -> list[int]:
        """The start of a family, at times with an end of its own."""
        start = self.random.choice(self.families)[: self.random.randrange(1, 420)]
        return start + [self.random.randrange(5, 1000) for _ in range(self.random.choice((0, 0, 1, 40)))]

    def act(self) -> None:
        engine = self.random.choice(self.engines)
        fate = self.random.random()
        if fate < 0.12 and len(engine.requests) < 10:
            self.number += 1
            prompt = self.prompt()
            self.prompts.append(prompt)
            engine.add(f"r{self.number}", prompt, self.random.choice((1, 1, 5, 60)))
            self.counts["requests"] += 1
        elif fate < 0.135 and engine.requests:
            engine.abort(self.random.choice(sorted(engine.requests)))
            self.counts["aborts"] += 1
        elif fate < 0.14:
            self.counts["local resets"] += bool(engine.scheduler.reset_prefix_cache())
        elif fate < 0.145:
            with contextlib.suppress(RuntimeError):  # blocks of loads and saves cannot be reset; they are preempted
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            self.counts["forced preemptions"] += 1
        self.disturb()
        engine.step(loads_first=self.random.random() < 0.5)
        self.counts["steps"] += 1

    def disturb(self) -> None:
        """Something happens to the pool."""
        now, fate = time.monotonic(), self.random.random()
        if self.down_until:
            if now > self.down_until:
                self.master.start()
                self.down_until = 0.0
        elif self.stopped_until:
            if now > self.stopped_until:
                self.master.signal(signal.SIGCONT)
                self.stopped_until = 0.0
        elif fate < 0.0008:
            self.master.kill()
            self.down_until = now + self.random.random()
            self.counts["master killed"] += 1
        elif fate < 0.002:
            self.master.signal(signal.SIGSTOP)
            self.stopped_until = now + self.random.random() * 0.3
            self.counts["master stopped"] += 1
        elif fate < 0.006:
            self.counts["keys removed"] += max(0, self.admin.remove_by_regex(f"{self.random.randrange(16):x}$", True))
        elif fate < 0.0065:
            self.counts["wipes"] += self.admin.remove_all(True) >= 0

    def end(self) -> None:
        """Everything comes to its end, and leaves nothing behind."""
        self.stopped_until = self.stopped_until and 1e-9
        self.down_until = self.down_until and 1e-9
        self.disturb()
        limit = time.monotonic() + END_LIMIT
        for engine in self.engines:
            while engine.busy:
                engine.step()
                time.sleep(0.0005)
                assert time.monotonic() < limit, f"requests do not end:\n{engine.describe()}"
            engine.check_idle()
            self.counts["preemptions"] += engine.preemptions
            self.counts["new starts"] += engine.restarts
            self.counts["tokens from the pool"] += engine.external

    def check_pool(self) -> None:
        """Every value in the pool is that of the tokens in its key; there are some, whatever was removed at last."""
        checked: set[str] = set()
        engine = self.engines[0]
        wait_until(lambda: self.master.metric("master_total_capacity_bytes"), 30, "segments are mounted again")
        limit = time.monotonic() + END_LIMIT
        names = [f"values checked of group {group.number}" for group in engine.half._groups.all]
        while not all(self.counts[name] for name in names) and time.monotonic() < limit:
            for _ in range(8):
                self.prompts.append([self.random.randrange(5, 1000) for _ in range(200)])
                engine.add(f"last{len(self.prompts)}", self.prompts[-1], 1)
            self.end()
            for number, prompt in enumerate(self.prompts):
                self.check_prompt(engine, f"check{len(self.prompts)}-{number}", prompt, checked)

    def check_prompt(self, engine: Engine, name: str, prompt: list[int], checked: set[str]) -> None:
        groups, shards = engine.half._groups, engine.worker._worker._loader._pool.shards
        engine.add(name, prompt, 1)
        request = engine.scheduler.requests[name]
        engine.abort(name)
        expected = numbers(prompt)
        for group, kind in zip(groups.all, engine.cache.groups, strict=True):
            size = group.block_size
            ends = range(size, groups.hashed(request) + 1, size)
            (shard,) = shards[group.number]
            keys = [shard.head + groups.hashes(request, end - size, end, size)[0].hex() for end in ends]
            for end, key, value in zip(ends, keys, self.admin.get_batch(keys) if keys else (), strict=True):
                if value and key not in checked:
                    checked.add(key)
                    assert kind.check_value(value, expected[:end]), f"{key} holds other tokens' KV"
                    self.counts[f"values checked of group {group.number}"] += 1

    def close(self) -> None:
        for engine in self.engines:
            began = time.monotonic()
            engine.close()
            self.counts["slow closes"] += time.monotonic() - began > 5
        self.admin.close()


def main() -> None:
    logging.disable(logging.ERROR)
    model, seed, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    kind = sys.argv[4] if len(sys.argv) > 4 else "full"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="storm-"))
        master = Master()
        stack.callback(master.stop)
        storm = Storm(model, seed, Path(folder), master, kind)
        stack.callback(storm.close)
        for _ in range(steps):
            storm.act()
        storm.end()
        storm.check_pool()
        storm.end()
        stack.close()
    print(json.dumps(storm.counts))


if __name__ == "__main__":
    main()
