"""What both courses of the demo need: the model, a pool, instances that are warm, and questions with their figures."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console

from mooncake.cli.children import Children, module_command
from mooncake.cli.engine_settings import write_pool_config
from mooncake.cli.loopback import fetch, metric
from mooncake.demo import document, model
from mooncake.demo.ask import Answer, NoAnswer, ask
from mooncake.demo.servers import Instance, Master, start_instance, start_master
from mooncake.demo.steps import Steps

SEGMENT_SIZE = 512 << 20  # bytes that each instance gives to the pool
MAX_TOKENS = 48
SAVE_LIMIT = 20.0  # seconds until what was computed is in the pool
_SETTLED = 1.0  # seconds without a new key


class Stage:
    """One run's; its servers belong to `children` and live until those are stopped."""

    def __init__(self, children: Children, folder: Path, cache: Path, console: Console) -> None:
        self.children = children
        self.folder = folder  # configuration and logs of this run
        self.pool_config = folder / "pool.json"
        self._model = cache / model.MODEL_NAME
        self._steps = Steps(console)

    def step(self, text: str) -> AbstractContextManager[None]:
        return self._steps.step(text)

    def make_model(self) -> None:
        if not model.is_made(self._model):
            model.find_gguf()
            with self.step(f"making the model folder of {model.MODEL_NAME} (once)"):
                command = module_command("mooncake.demo.model", str(self._model))
                self.children.run("Making the model", command, self.folder / "model.log")

    def start_master(self) -> Master:
        """The pool's; its address is in `pool_config`."""
        with self.step("starting the master"):
            master = start_master(self.children, self.folder)
        write_pool_config(self.pool_config, master.port, SEGMENT_SIZE)
        return master

    def start(self, name: str, transfer: str, environment: Mapping[str, str]) -> Instance:
        return start_instance(self.children, name, self._model, self.folder, transfer, environment)

    def warm_up(self, instance: Instance, turn: int = 0) -> None:
        """A prompt of the instance's own, so that its first real work is not measured and no block is shared."""
        counting = " ".join(str(number) for number in range(60))
        text = f"{instance.port + turn} is where you live. Count on: {counting}"
        with self.step(f"warming up {instance.name}"):
            self._ask(instance, [{"role": "user", "content": text}], max_tokens=4)

    def question(self, instance: Instance, text: str, **more: str) -> Answer:
        """Ask about the document; `text` is the step, `more` goes into the request."""
        with self.step(text):
            return self._ask(instance, document.chat(), MAX_TOKENS, **more)

    def wait_saved(self, master: Master, text: str) -> None:
        """Saving goes on behind the answer.  What is late only makes fewer hits, which the table then shows."""
        with self.step(text):
            keys, since = keys_in(master), time.monotonic()
            deadline = since + SAVE_LIMIT
            while time.monotonic() < min(deadline, since + _SETTLED):
                self.children.check()
                time.sleep(0.1)
                if (now := keys_in(master)) != keys:
                    keys, since = now, time.monotonic()

    def _ask(self, instance: Instance, messages: list[dict[str, str]], max_tokens: int, **more: str) -> Answer:
        try:
            return ask(instance, messages, max_tokens, **more)
        except NoAnswer:
            self.children.check()  # the better error, if a process is gone
            raise


def keys_in(master: Master) -> int:
    return int(metric(fetch(master.metrics_port, "/metrics") or "", "master_key_count"))
