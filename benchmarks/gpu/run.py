"""A run: the engines that still live, the time that is left, prompts that nobody has seen."""

import itertools
import random
import sys
import time
from typing import Any

from benchmarks.gpu.configurations import CONFIGURATIONS
from benchmarks.gpu.services import Clock, Engine, Failed, Services

TAIL = 5  # tokens beyond a whole number of blocks, so that the GPU's own cache hits all of those


class OutOfTime(Exception):
    pass


class Run:
    def __init__(self, options: Any, services: Services, clock: Clock) -> None:
        self.options = options
        self.services = services
        self.clock = clock
        self.engines: dict[str, Engine] = {}
        self.failures: dict[str, str] = {}
        self._seeds = itertools.count(random.SystemRandom().randrange(1 << 48, 1 << 56))

    def start(self, names: list[str]) -> None:
        """Start these at once and wait for all; what fails is told and left out."""
        begin = time.monotonic()
        for name in names:
            try:
                self.engines[name] = self.services.engine(CONFIGURATIONS[name])
            except Failed as failure:
                self._drop(name, failure)
        for name, engine in list(self.engines.items()):
            if name in names:
                try:
                    engine.ready(self.clock.left)
                    facts = f"{engine.facts['blocks']} blocks of {engine.facts['block_size']} tokens"
                    print(f"{name}: ready after {time.monotonic() - begin:.0f} s, {facts}", flush=True)
                except Failed as failure:
                    self._drop(name, failure)

    def stop(self, names: list[str]) -> None:
        for name in names:
            engine = self.engines.pop(name, None)
            if engine is not None:
                engine.end()

    def alive(self, *, pool_only: bool = False) -> list[str]:
        return [name for name in self.engines if not pool_only or CONFIGURATIONS[name].transfer]

    def call(self, name: str, method: str, **arguments: Any) -> Any:
        """What an engine answers; raises Failed when it does not, and the engine is left out from then on.

        Raises OutOfTime, for the part that is being measured to end with what it has.
        """
        if self.clock.left < 1:
            raise OutOfTime
        try:
            return self.engines[name].call(method, self.clock.left, **arguments)
        except Failed as failure:
            self._drop(name, failure)
            if self.clock.left < 1:
                raise OutOfTime from None
            raise

    def prompt(self, length: int) -> list[int]:
        """One that no engine has seen, as its seed and its tokens."""
        return [next(self._seeds), length + TAIL]

    def saved(self, name: str, length: int) -> None:
        """Let the saves of `length` tokens end."""
        seconds = 0.1 + self.options.settle * length / 1024 if CONFIGURATIONS[name].transfer else 0.02
        self.call(name, "settle", seconds=seconds)

    def forget(self, name: str, *, pool: bool = False) -> None:
        """Empty the engine's own prefix cache, which also shows that all of its saves are over."""
        if not self.call(name, "forget", seconds=20, pool=pool and CONFIGURATIONS[name].gives):
            failure = Failed(f"{name}: its prefix cache cannot be emptied, blocks stay in use")
            self._drop(name, failure)
            raise failure

    def _drop(self, name: str, failure: Failed) -> None:
        self.failures[name] = str(failure)
        print(f"{name} FAILED: {failure}", file=sys.stderr, flush=True)
        engine = self.engines.pop(name, None)
        if engine is not None:
            engine.end()
