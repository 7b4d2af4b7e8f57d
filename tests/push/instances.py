"""Prefill and decode workers as vLLM would run them, without vLLM: real sockets, real copies, numpy memory."""

import secrets
import time
from types import SimpleNamespace

import numpy as np

from mooncake.cli.loopback import free_ports
from mooncake.vllm.push.heads import heads_of
from mooncake.vllm.push.items import Handed, Pull, Share
from mooncake.vllm.push.routes import Ranks
from mooncake.vllm.push.settings import PushSettings
from mooncake.vllm.push.site import Site
from mooncake.vllm.push.worker import Worker
from tests.processes import wait_until
from tests.push.memory import BLOCK, HEADS, LAYERS, Memory

LIMIT = 3  # seconds


class Counted:
    """What was counted, by name."""

    def __init__(self) -> None:
        self.transfers: list[tuple[float, int, int]] = []
        self.failed = self.lacking = self.late = 0

    def sent(self, seconds: float, size: int, pieces: int) -> None:
        self.transfers.append((seconds, size, pieces))

    def failed_to_send(self) -> None:
        self.failed += 1

    def failed_to_receive(self) -> None:
        self.lacking += 1

    def expired(self) -> None:
        self.late += 1


def plan(**parts) -> SimpleNamespace:
    nothing = {"pulls": {}, "cancels": [], "begun": {}, "shares": [], "preempted": [], "finished": [], "dropped": {}}
    return SimpleNamespace(**{**nothing, **parts})


class Instance:
    """All ranks of one engine."""

    def __init__(self, stack, role: str, size: int = 1, *, kind: str = "heads first", port: int = 0, blocks: int = 64,
                 stages: int = 1, limit: int = LIMIT, block_size: int = BLOCK, heads: int = HEADS,
                 host: str = "127.0.0.1") -> None:  # fmt: skip
        self.host, self.port = host, port or free_ports(1)[0]
        self.engine = f"{role}-{secrets.token_hex(4)}"
        self.heads = heads
        self.memories: list[Memory] = []
        self.workers: list[Worker] = []
        self.counted = Counted()
        settings = PushSettings(num_workers=3, bootstrap_port=self.port, abort_limit=limit)
        for stage in range(stages):
            for rank in range(size):
                ranks = Ranks(rank, size, stage, stages)
                site = Site(self.engine, host, ranks, 0, not (rank or stage), host, heads, blocks, block_size, True)
                worker = Worker(settings, site, self.counted, hands=role != "decode", pulls=role != "prefill")
                memory = Memory(kind, heads_of(rank, size, heads), blocks=blocks)
                caches = dict(list(memory.caches.items())[stage * LAYERS // stages : (stage + 1) * LAYERS // stages])
                worker.register(caches)
                self.memories.append(memory)
                self.workers.append(worker)
        self._closed = False
        stack.callback(self.close)
        self.received: list[set[str]] = [set() for _ in self.workers]
        self.failed: dict[str, int] = {}
        self.sent: list[set[str]] = [set() for _ in self.workers]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for worker in reversed(self.workers):
                worker.close()

    # -- as prefill

    def compute(self, name: str, blocks: list[int], first: int = 0, end: int | None = None, *,
                pause: float = 0.0, called: int = 1) -> None:  # fmt: skip
        """One step: blocks [first, end) of a prompt, which lie in `blocks`, called `called`, `called` + 1, ..."""
        end = len(blocks) if end is None else end
        share = Share(name, blocks[first:end], end)
        for worker, memory in zip(self.workers, self.memories, strict=True):
            worker.begin_step(plan(shares=[share]))
            for layer in range(LAYERS):
                for i in range(first, end):
                    memory.fill(blocks[i], called + i, (layer,))
                worker.steps.layer(f"layers.{layer}")
                time.sleep(pause)
            worker.steps.end()

    def begin(self, name: str, transfer: str, tokens: int, digest: int = 0) -> None:
        self._all(plan(begun={name: Handed(transfer, tokens, digest)}))

    def preempt(self, name: str) -> None:
        self._all(plan(preempted=[name]))

    def finish(self, name: str) -> None:
        self._all(plan(finished=[name]))

    def drop(self, transfer: str, reason: str = "it was aborted") -> None:
        self._all(plan(dropped={transfer: reason}))

    def hand(self, name: str, transfer: str, blocks: list[int]) -> None:
        """All of it."""
        self.begin(name, transfer, len(blocks) * BLOCK)
        self.compute(name, blocks)
        self.finish(name)

    def has_let_go(self, name: str) -> bool:
        for sent, worker in zip(self.sent, self.workers, strict=True):
            sent |= worker.take_sent()
        return all(name in sent for sent in self.sent)

    def _all(self, what: SimpleNamespace) -> None:
        for worker in self.workers:
            worker.begin_step(what)

    # -- as decode

    def pull(self, name: str, transfer: str, of: "Instance", blocks: list[int], first: int = 0, *, tokens: int = 0,
             digest: int = 0, engine: str = "") -> None:  # fmt: skip
        registry = f"http://{of.host}:{of.port}"
        tokens = tokens or (first + len(blocks)) * BLOCK
        pull = Pull(transfer, registry, engine or of.engine, first, blocks, tokens, digest)
        for worker in self.workers:
            worker.start_pulls(plan(pulls={name: pull}))

    def cancel(self, name: str) -> None:
        for worker in self.workers:
            worker.start_pulls(plan(cancels=[name]))

    def has(self, name: str) -> bool:
        for received, worker in zip(self.received, self.workers, strict=True):
            received |= worker.take_received()
            self.failed |= worker.take_failed()
        return all(name in received for received in self.received)

    def wait_for(self, name: str, limit: float = 10.0) -> bool:
        """Until it waits no more; whether all of it came."""
        wait_until(lambda: self.has(name), limit, f"the end of {name}")
        return name not in self.failed

    def check(self, blocks: list[int], first: int = 0) -> None:
        for memory in self.memories:
            for i, block in enumerate(blocks):
                memory.check(block, first + i + 1)

    def touched(self, but: list[int]) -> set[int]:
        found: set[int] = set()
        for memory in self.memories:
            found |= memory.touched(set(but))
        return found


def known(instance: Instance) -> None:
    """Wait until its registry knows it."""
    import urllib.request

    def there() -> bool:
        with urllib.request.urlopen(f"http://{instance.host}:{instance.port}/query", timeout=5) as answer:
            return instance.engine.encode() in answer.read()

    wait_until(there, 10, "the registry")


def shuffled(seed: int, count: int, of: int = 64) -> list[int]:
    return np.random.default_rng(seed).permutation(of)[:count].tolist()
