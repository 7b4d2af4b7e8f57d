"""Asking the master how much of requests' prompts is in the pool, behind the scheduler's back.

`ask` returns at once; threads take all that was asked meanwhile in one round trip.  The scheduler's thread never waits
here, and never holds a lock that is held during a call.
"""

import logging
import threading
import time
from pathlib import Path

from mooncake.client.prefixes import PrefixClient
from mooncake.errors import StoreError
from mooncake.rpc.messages import Need
from mooncake.vllm.blocks import tails
from mooncake.vllm.weights import adapter_fingerprint

logger = logging.getLogger("vllm.mooncake")

VALID = 4.0  # seconds that an answer holds: what was found is leased for 10
_THREADS = 2  # so that one slow answer does not hold up the next question


class Lookup:
    """A question about a request's units `first` and on, and its answer: it can go on behind `count` of them.

    `needs`: what is needed of each group of layers; `hashes`: `step` for a unit.
    """

    __slots__ = ("adapter_path", "answered", "asked", "count", "counted", "first", "hashes", "needs", "reason", "step")

    def __init__(self, needs: list[Need], first: int, hashes: list[bytes], adapter_path: str, step: int) -> None:
        self.needs = needs
        self.first = first
        self.hashes = hashes
        self.adapter_path = adapter_path
        self.step = step
        self.asked = time.monotonic()
        self.answered = 0.0  # when, 0: not yet
        self.count = 0
        self.counted = False  # in the metrics
        self.reason = ""  # why the answer is 0 though the pool was not found empty

    def settle(self, count: int, reason: str = "") -> None:
        """The first answer counts: a late one changes nothing that the scheduler relied on."""
        if not self.answered:
            self.count, self.reason, self.answered = count, reason, time.monotonic()

    @property
    def end(self) -> int:
        """The first unit that is not there."""
        return self.first + self.count

    def serves(self, first: int) -> bool:
        """Whether the answer tells, now, what is there of unit `first` and on."""
        if self.answered and time.monotonic() - self.answered > VALID:
            return False
        return self.first <= first and (not self.answered or first <= self.end)


class Lookups:
    def __init__(self, client: PrefixClient) -> None:
        self._client = client
        self._waiting: list[Lookup] = []
        self._wake = threading.Condition()
        self._closed = False
        self._adapters: dict[str, str | None] = {}
        self._threads: list[threading.Thread] = []

    def ask(self, needs: list[Need], first: int, hashes: list[bytes], adapter_path: str, step: int = 1) -> Lookup:
        """A lookup that will be answered; with the master known to be down it is at once."""
        lookup = Lookup(needs, first, hashes, adapter_path, step)
        if self._client.down:
            lookup.settle(0, "master_down")
            return lookup
        if not self._threads:
            for _ in range(_THREADS):
                thread = threading.Thread(target=self._run, name="mooncake-lookup", daemon=True)
                self._threads.append(thread)
                thread.start()
        with self._wake:
            self._waiting.append(lookup)
            self._wake.notify()
        return lookup

    def adapter(self, path: str) -> str | None:
        """What stands before hashes in the keys of a LoRA adapter's blocks, once a lookup has found it out; None: not
        yet, or its files cannot be read."""
        return self._adapters.get(path) if path else ""

    def remove(self, pattern: str, limit: float) -> bool:
        """Remove all keys with `pattern`; whether that was confirmed within `limit` seconds."""
        done: list[int] = []

        def remove() -> None:
            try:
                done.append(self._client.remove(pattern))
            except StoreError as error:
                logger.warning("The blocks of this model were not removed from the pool: %s", error)

        thread = threading.Thread(target=remove, name="mooncake-remove", daemon=True)
        thread.start()
        thread.join(limit)
        return bool(done)

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(2)
        self._client.close()

    # -- in the threads

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                asked, self._waiting = self._waiting, []
            try:
                self._answer([lookup for lookup in asked if not lookup.answered])
            except StoreError as error:
                logger.debug("The master did not say what the pool has: %s", error)
                reason = "master_error"
            except Exception:
                logger.exception("A look-up failed")
                reason = "error"
            else:
                continue
            for lookup in asked:
                lookup.settle(0, reason)

    def _answer(self, asked: list[Lookup]) -> None:
        alike: dict[tuple[int, int], list[tuple[Lookup, str]]] = {}
        for lookup in asked:
            adapter = self._find_adapter(lookup.adapter_path)
            if adapter is None:
                lookup.settle(0, "adapter_unreadable")
            else:
                alike.setdefault((id(lookup.needs), lookup.step), []).append((lookup, adapter))
        for (_, step), lookups in alike.items():
            lists = [tails(adapter, lookup.hashes) for lookup, adapter in lookups]
            places = self._client.places(lookups[0][0].needs, lists, step)
            for (lookup, _), place in zip(lookups, places, strict=True):
                lookup.settle(place // step)

    def _find_adapter(self, path: str) -> str | None:
        if not path:
            return ""
        if path not in self._adapters:
            try:
                self._adapters[path] = f"lora-{adapter_fingerprint(Path(path))}/"
            except OSError as error:
                logger.warning(
                    "The LoRA adapter %s cannot be read (%s); its requests are not shared",
                    path,
                    error.strerror or error,
                )
                self._adapters[path] = None
        return self._adapters[path]
