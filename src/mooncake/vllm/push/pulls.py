"""Decode's worker: prompts on their way from prefill.

Each is a task that ends in "received", whatever happens; what did not come whole is among the failed as well, with how
many of its first blocks did.  It does not end before nobody writes to the request's blocks any more.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from mooncake.vllm.device import Fence
from mooncake.vllm.push.counts import Counts
from mooncake.vllm.push.heads import idle_sources, sources
from mooncake.vllm.push.items import Pull
from mooncake.vllm.push.links import Link, Outcome
from mooncake.vllm.push.loop import LoopThread
from mooncake.vllm.push.registry import Directory, UnknownEngineError, Workers
from mooncake.vllm.push.routes import Ranks
from mooncake.vllm.push.serving import SCHEME
from mooncake.vllm.push.wire import Ask, Greet, clock

logger = logging.getLogger("vllm.mooncake")

_RELEASE_LIMIT = 10.0  # seconds in which prefill is told that nothing is wanted


class _Asked(NamedTuple):
    link: Link
    number: int
    outcome: "asyncio.Future[Outcome]"


class Pulls:
    def __init__(
        self,
        loop: LoopThread,
        greet: Callable[[str], Greet],
        ranks: Ranks,
        heads: int,
        limit: float,
        settle: Callable[[list[int]], None],
        tally: Counts,
    ) -> None:
        """`greet` says who we are to an engine.  `heads`: of the model.  `limit`: seconds for one prompt.  `settle`
        waits until copies to some blocks, that are under way, have ended."""
        self._loop, self._greet, self._ranks, self._heads = loop, greet, ranks, heads
        self._limit, self._settle, self._tally = limit, settle, tally
        self._directory = Directory()
        self._links: dict[tuple[str, str], Link] = {}
        self._numbers = count(1)
        self._stops: dict[str, asyncio.Event] = {}  # by request
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._received: set[str] = set()
        self._failed: dict[str, int] = {}

    # -- the engine's thread

    def begin(self, request: str, pull: Pull, fence: Fence) -> None:
        """`fence` passes when nothing of this engine uses the blocks any more."""
        self._loop.soon(self._begin, request, pull, fence)

    def cancel(self, request: str) -> None:
        self._loop.soon(self._cancel, request)

    def take_received(self) -> set[str]:
        """Requests whose pulls have ended since the last call."""
        with self._lock:
            received, self._received = self._received, set()
        return received

    def take_failed(self) -> dict[str, int]:
        """Those of them that did not come whole, and how many of their first blocks did."""
        with self._lock:
            failed, self._failed = self._failed, {}
        return failed

    # -- the loop

    def _begin(self, request: str, pull: Pull, fence: Fence) -> None:
        if pull.blocks:
            self._stops[request] = asyncio.Event()
        task = asyncio.create_task(self._pull(request, pull, fence) if pull.blocks else self._release(pull))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self, request: str) -> None:
        if request in self._stops:
            self._stops[request].set()

    async def _pull(self, request: str, pull: Pull, fence: Fence) -> None:
        reason, whole, began = "the instance is closed", 0, clock()
        try:
            await asyncio.get_running_loop().run_in_executor(None, fence.wait)
            reason, whole = await self._fetch(pull, self._stops[request])
        except UnknownEngineError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("Request %s: its prompt cannot be had from prefill", request)
            reason = repr(error)
        finally:
            cancelled = self._stops.pop(request).is_set()
            with self._lock:
                self._received.add(request)
                if reason:
                    self._failed[request] = whole
            if reason and not cancelled:
                self._tally.failed_to_receive()
                logger.warning("Request %s: %d blocks are computed here: %s", request, len(pull.blocks) - whole, reason)
            logger.debug(
                "kv_transfer request=%s transfer=%s blocks=%d from_prefill=%d waited_ms=%.1f reason=%s",
                request,
                pull.transfer,
                len(pull.blocks),
                whole if reason else len(pull.blocks),
                (clock() - began) * 1e3,
                reason or "whole",
            )

    async def _fetch(self, pull: Pull, stop: asyncio.Event) -> tuple[str, int]:
        """(empty, or why not all blocks came; how many of the first did then).  Nothing is written to them any more.
        Raises UnknownEngineError."""
        workers = await self._directory.find(pull.registry, pull.engine)
        asked = self._ask_all(pull, workers)
        reason = await self._first_failure([each.outcome for each in asked], stop)
        if not reason:
            return "", 0
        for each in asked:
            each.link.cancel(each.number)
        outcomes = await asyncio.gather(*(each.outcome for each in asked))
        if not all(outcome.told for outcome in outcomes):
            self._directory.forget(pull.registry, pull.engine)
            await asyncio.sleep(max(0.0, max(outcome.until for outcome in outcomes) - clock()))
            await asyncio.get_running_loop().run_in_executor(None, self._settle, pull.blocks)
        return reason, min(outcome.whole if outcome.reason else len(pull.blocks) for outcome in outcomes)

    async def _first_failure(self, outcomes: "list[asyncio.Future[Outcome]]", stop: asyncio.Event) -> str:
        """Empty once all are whole."""
        stopped = asyncio.create_task(stop.wait())
        give_up = clock() + self._limit
        try:
            while not (reason := _first_reason(outcomes)):
                left: list[asyncio.Future[Any]] = [each for each in outcomes if not each.done()]
                if not left:
                    return ""
                timeout = max(0.0, give_up - clock())
                done, _ = await asyncio.wait([*left, stopped], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if stopped in done:
                    return "it is not wanted any more"
                if not done:
                    return f"prefill did not bring it within {self._limit:g} s"
            return reason
        finally:
            stopped.cancel()

    async def _release(self, pull: Pull) -> None:
        """Tell prefill that nothing of a prompt is wanted."""
        try:
            workers = await self._directory.find(pull.registry, pull.engine)
            asked = self._ask_all(pull, workers)
            await asyncio.wait([each.outcome for each in asked], timeout=_RELEASE_LIMIT)
        except UnknownEngineError as error:
            logger.debug("Transfer %s need not be let go: %s", pull.transfer, error)

    def _ask_all(self, pull: Pull, workers: Workers) -> list[_Asked]:
        """Ask the ranks of prefill that send to this one; those that send to nobody are told so.  Raises
        UnknownEngineError before anything was asked."""
        place = self._ranks.tensor, self._ranks.tensor_size, workers.tensor_size, self._heads
        wanted = self._links_to(pull.engine, workers, list(sources(*place)))
        idle = self._links_to(pull.engine, workers, idle_sources(*place))
        for link in idle:
            self._ask(link, pull, b"")
        blocks = np.array(pull.blocks, np.int64).tobytes()
        return [self._ask(link, pull, blocks) for link in wanted]

    def _ask(self, link: Link, pull: Pull, blocks: bytes) -> _Asked:
        number = next(self._numbers)
        ask = Ask(number, pull.transfer, pull.first, blocks, pull.tokens, pull.digest)
        return _Asked(link, number, link.ask(ask))

    def _links_to(self, engine: str, workers: Workers, tensor_ranks: list[int]) -> list[Link]:
        """Raises UnknownEngineError."""
        links = []
        for place in [(rank, stage) for rank in tensor_ranks for stage in range(workers.pipeline_size)]:
            address = workers.addresses.get(place, "")
            if not address.startswith(SCHEME):
                what = f"speaks another protocol ({address})" if address else "is not known to its registry"
                raise UnknownEngineError(
                    f"worker {place} of engine {engine} {what}; use mooncake.vllm's MooncakeConnector on both sides"
                )
            link = self._links.get((address, engine))
            if link is None or link.closed:
                link = self._links[address, engine] = Link(address, self._greet(engine))
                for name in [name for name, each in self._links.items() if each.closed]:
                    del self._links[name]
            links.append(link)
        return links


def _first_reason(outcomes: "list[asyncio.Future[Outcome]]") -> str:
    """Why one of those that are done failed, or ""."""
    return next((each.result().reason for each in outcomes if each.done() and each.result().reason), "")
