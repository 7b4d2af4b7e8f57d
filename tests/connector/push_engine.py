"""One instance of the push storm: an engine without a model, in a process of its own that can be stopped and killed.

Reads commands, one JSON line each, and steps as long as there is anything to do:

    {"add": name, "prompt": [...], "count": tokens, "params": {...}}
    {"abort": name}    {"preempt": true}    {"idle": true}

Answers {"engine": id} once it is ready, {"done": name} for each answer, which it has checked, and {"idle": counts} once
nothing is left.  Whatever is wrong ends the process.
"""

import json
import os
import random
import select
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import ClassVar

from mooncake.vllm.push import serving
from tests.connector.engine import Engine

IDLE_LIMIT = 150.0  # seconds in which everything must come to its end: few prompts have room at a time, and those that
# nobody fetches any more go after a time limit each


class PushEngine(Engine):
    connector = "MooncakeConnector"
    settings: ClassVar[dict] = {}

    def _adjust(self, kind: str) -> None:
        pass

    def _forward(self, scheduled: dict[str, int]) -> dict[str, list[int]]:
        """Layer by layer, with the hook behind each."""
        (group,) = self.cache.groups
        parts = {name: self._part(name, count) for name, count in scheduled.items()}
        tables = {name: self.scheduler.kv_cache_manager.get_block_ids(name)[0] for name in scheduled}
        for layer, cache in self.cache.caches.items():
            for name, (expected, done) in parts.items():
                group.forward([cache], tables[name], expected, done, name)
            self.worker.save_kv_layer(layer, cache, None)
        return {name: self._sample(name, expected) for name, (expected, _) in parts.items()}

    def _take(self, output) -> None:
        super()._take(output)
        if output.finish_reason is not None and output.request_id not in self.requests:
            say(done=output.request_id)

    def check_idle(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still held"
        assert not self.scheduler.requests, list(self.scheduler.requests)
        planner, worker = self.scheduler.connector._planner, self.worker._worker
        assert not (planner._handing or planner._held or planner._pulling or planner._spared)
        if worker.pushes is not None:
            limit = time.monotonic() + 12  # early Asks for what never came outlive their requests
            while worker.pushes._transfers or worker.pushes._asks:
                assert time.monotonic() < limit, (worker.pushes._transfers, worker.pushes._asks)
                time.sleep(0.05)
        if worker.pulling is not None:
            assert not worker.pulling._stops


class Faulty:
    """A transfer engine that is slow and fails now and then, having copied or not."""

    def __init__(self, engine, source: random.Random, counts: Counter) -> None:
        self._engine, self._random, self._counts = engine, source, counts

    def move_pieces(self, target, write, local, remote):
        from mooncake.errors import TransferError

        fate = self._random.random()
        time.sleep(self._random.random() ** 4 * 0.05)
        if fate < 0.02:
            self._counts["pushes failed"] += 1
            raise TransferError("made to fail")
        self._engine.move_pieces(target, write, local, remote)
        self._counts["pushes"] += 1
        self._counts["bytes pushed"] += local.total
        if fate > 0.99:
            self._counts["pushes failed late"] += 1
            raise TransferError("made to fail after it")


def say(**message) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


def break_connections(source: random.Random, counts: Counter) -> None:
    """Now and then a connection breaks in place of saying that something has ended."""
    write = serving._write

    def faulty(writer, message):
        if source.random() < 0.03:
            counts["words lost"] += 1
            writer.transport.abort()
        else:
            write(writer, message)

    serving._write = faulty


def main(model: str, role: str, seed: int) -> None:
    source, counts = random.Random(seed), Counter()
    engine = PushEngine(model, source.choice((30, 90, 90)), role)  # few blocks: requests of both sides keep others out
    worker = engine.worker._worker
    if worker._copies is not None:
        worker._copies._mover = Faulty(worker._engine, source, counts)
        break_connections(source, counts)
    say(engine=engine.scheduler.vllm_config.kv_transfer_config.engine_id)
    buffer = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0 if engine.busy else 0.002)
        if ready:
            data = os.read(0, 1 << 20)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                obey(engine, json.loads(line), counts)
        if engine.busy:
            engine.step(loads_first=source.random() < 0.5)
            time.sleep(source.random() * 0.004)
    engine.close()


def obey(engine: PushEngine, command: dict, counts: Counter) -> None:
    if "add" in command:
        engine.add(command["add"], command["prompt"], command["count"], command["params"])
    elif "abort" in command:
        engine.abort(command["abort"])
    elif "preempt" in command:
        with suppress(
            RuntimeError
        ):  # blocks that are being filled or handed over cannot be reset; others are preempted
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        limit = time.monotonic() + IDLE_LIMIT
        while engine.busy:
            engine.step()
            time.sleep(0.001)
            assert time.monotonic() < limit, f"requests do not end: {engine.scheduler.requests}"
        engine.check_idle()
        say(idle={**counts, "external": engine.external, "preemptions": engine.preemptions})
        counts.clear()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
