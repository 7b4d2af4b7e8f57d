"""The course of the demo.

The reference answer comes first, from an instance that knows of no pool; it starts beside A and is gone before
anything is measured.  Then A is asked (cold: it computes the whole prompt and saves its blocks), B starts and is asked
the same (warm).  Never more than two instances at a time.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mooncake.cli.children import Children, module_command
from mooncake.cli.engine_settings import write_pool_config
from mooncake.cli.loopback import fetch, metric
from mooncake.demo import document, model
from mooncake.demo.ask import Answer, NoAnswer, ask, tokens_from_pool
from mooncake.demo.report import Figures
from mooncake.demo.servers import BLOCK_SIZE, Instance, Master, start_instance, start_master, wait_ready
from mooncake.demo.steps import Steps

SEGMENT_SIZE = 512 << 20  # bytes that each instance gives to the pool
MAX_TOKENS = 48
SAVE_LIMIT = 20.0  # seconds until what A computed is in the pool
_SETTLED = 1.0  # seconds without a new key


@dataclass(frozen=True)
class Outcome:
    """The figures, and what still runs."""

    figures: Figures
    master: Master
    a: Instance
    b: Instance


class Demo:
    """One run; its servers belong to `children` and live until those are stopped."""

    def __init__(self, children: Children, folder: Path, cache: Path, console: Console) -> None:
        self._children = children
        self._folder = folder  # configuration and logs of this run
        self._model = cache / model.MODEL_NAME
        self._steps = Steps(console)
        self._pool = folder / "pool.json"

    def run(self) -> Outcome:
        self._make_model()
        with self._steps.step("starting the master"):
            master = start_master(self._children, self._folder)
        write_pool_config(self._pool, master.port, SEGMENT_SIZE)
        with self._steps.step("starting vLLM instance A, and a reference instance without a pool"):
            reference = self._start("reference", pool=None)
            a = self._start("instance A", self._pool)
            wait_ready(self._children, reference, a)
        self._warm_up(reference)
        alone = self._question(reference, "asking the reference instance")
        with self._steps.step("stopping the reference instance"):
            self._children.stop(reference.child)
        self._warm_up(a)
        cold = self._question(a, "asking instance A (cold)")
        with self._steps.step("waiting until A's blocks are in the pool"):
            self._wait_saved(master)
        with self._steps.step("starting vLLM instance B"):
            b = self._start("instance B", self._pool)
            wait_ready(self._children, b)
        self._warm_up(b)
        loaded_before = tokens_from_pool(b)
        warm = self._question(b, "asking instance B (warm)")
        figures = _figures(master, alone, cold, warm, tokens_from_pool(b) - loaded_before)
        return Outcome(figures, master, a, b)

    def _make_model(self) -> None:
        if not model.is_made(self._model):
            model.find_gguf()
            with self._steps.step(f"making the model folder of {model.MODEL_NAME} (once)"):
                command = module_command("mooncake.demo.model", str(self._model))
                self._children.run("Making the model", command, self._folder / "model.log")

    def _start(self, name: str, pool: Path | None) -> Instance:
        return start_instance(self._children, name, self._model, self._folder, pool)

    def _warm_up(self, instance: Instance) -> None:
        """A prompt of the instance's own, so that its first real work is not measured and no block is shared."""
        counting = " ".join(str(number) for number in range(60))
        messages = [{"role": "user", "content": f"{instance.port} is where you live. Count on: {counting}"}]
        with self._steps.step(f"warming up {instance.name}"):
            self._ask(instance, messages, max_tokens=4)

    def _question(self, instance: Instance, text: str) -> Answer:
        with self._steps.step(text):
            return self._ask(instance, document.chat(), MAX_TOKENS)

    def _ask(self, instance: Instance, messages: list[dict[str, str]], max_tokens: int) -> Answer:
        try:
            return ask(instance, messages, max_tokens)
        except NoAnswer:
            self._children.check()  # the better error, if a process is gone
            raise

    def _wait_saved(self, master: Master) -> None:
        """Saving goes on behind the answer.  What is late only makes fewer hits, which the table then shows."""
        keys, since = _keys(master), time.monotonic()
        deadline = since + SAVE_LIMIT
        while time.monotonic() < min(deadline, since + _SETTLED):
            self._children.check()
            time.sleep(0.1)
            if (now := _keys(master)) != keys:
                keys, since = now, time.monotonic()


def _keys(master: Master) -> int:
    return int(metric(fetch(master.metrics_port, "/metrics") or "", "master_key_count"))


def _figures(master: Master, alone: Answer, cold: Answer, warm: Answer, pool_tokens: int) -> Figures:
    metrics = fetch(master.metrics_port, "/metrics") or ""
    return Figures(
        model=model.MODEL_NAME,
        ttft_cold_s=round(cold.first_token_s, 4),
        ttft_warm_s=round(warm.first_token_s, 4),
        ratio=round(warm.first_token_s / cold.first_token_s, 4),
        ttft_without_pool_s=round(alone.first_token_s, 4),
        prompt_tokens=warm.prompt_tokens,
        block_size=BLOCK_SIZE,
        pool_tokens=pool_tokens,
        pool_keys=int(metric(metrics, "master_key_count")),
        pool_used_bytes=int(metric(metrics, "master_allocated_bytes")),
        pool_capacity_bytes=int(metric(metrics, "master_total_capacity_bytes")),
        same_answer=alone.token_ids == cold.token_ids == warm.token_ids,
        answer=warm.text,
    )
