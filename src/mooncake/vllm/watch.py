"""What the connector sees of requests on the scheduler's side: where their tokens came from, how long they waited,
whether loading was worth it, what events to publish.

Stands between vLLM and the scheduler's half, which it neither asks nor tells anything: it reads what the one asks and
the other answers, and may turn an offer of a load down.  Never waits, and does next to nothing a step.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from mooncake.vllm.events import Events
from mooncake.vllm.identity import key_identity
from mooncake.vllm.lookup import Lookup
from mooncake.vllm.plan import Report, StepPlan
from mooncake.vllm.stats import Tally
from mooncake.vllm.worth import Worth

logger = logging.getLogger("vllm.mooncake")


class _Seen:
    """A request that is not over.  Times are monotonic, 0.0 until known."""

    __slots__ = ("computing", "declined", "load_began", "loading", "local", "lookup", "request", "started", "tokens")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.lookup: Lookup | None = None  # that was looked at last
        self.local = 0  # tokens that vLLM's own cache had
        self.declined: int | None = None  # tokens whose load was turned down, 0: was not
        self.started = False
        self.loading = 0  # tokens
        self.load_began = 0.0
        self.tokens = 0  # that are computed until its first token
        self.computing = 0.0  # when that began


class Watch:
    def __init__(
        self,
        tally: Tally,
        block_size: int,
        worth: Worth | None,
        events: Events | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`block_size` in tokens.  `worth`: what declines loads; None: nothing does.  `events`: None: none are told."""
        self._tally = tally
        self._block_size = block_size
        self._worth = worth
        self._events = events
        self._clock = clock
        self._heads: dict[int, list[list[str]]] = {}  # how keys begin, by rank and group
        self._seen: dict[str, _Seen] = {}
        self._computing: dict[str, _Seen] = {}

    def offered(
        self, request: Any, local: int, offer: tuple[int | None, bool], lookup: Lookup | None
    ) -> tuple[int | None, bool]:
        """vLLM asked what the pool has beyond `local` tokens, which `lookup` has said; what vLLM is told.

        It asks with every step while a request waits, so a request's load is decided on once.
        """
        tokens, later = offer
        seen = self._seen.get(request.request_id)
        if seen is None:
            seen = self._seen[request.request_id] = _Seen(request)
            if self._events is not None:
                self._events.add(request)
        seen.local = local
        if self._events is not None and lookup is not seen.lookup:
            seen.lookup = lookup
            self._events.answered(lookup)
        if not tokens or self._worth is None:
            return offer
        if seen.declined is None:
            seen.declined = tokens if self._worth.declines(tokens) else 0
            if seen.declined:
                blocks = tokens // self._block_size
                self._tally.add("load_skipped", 0.0, blocks, status="slower_than_computing", failed=blocks)
                logger.debug("kv_transfer request=%s declined=%d: computing is quicker", request.request_id, tokens)
        return (0, False) if seen.declined else (tokens, later)

    def allocated(self, request: Any, external: int) -> None:
        """vLLM gave a request its blocks, for `external` tokens to load, or for none."""
        seen = self._seen.get(request.request_id)
        if seen is None:
            return
        if not seen.started:
            seen.started = True
            if seen.local:
                self._tally.add("hit_tokens", 0.0, seen.local, status="gpu")
        if external:
            seen.loading, seen.load_began = external, self._clock()

    def planned(self, plan: StepPlan, scheduled: Collection[str]) -> None:
        """A step begins that computes something for the requests `scheduled`."""
        if self._events is not None:
            self._events.planned(plan, scheduled)
        if self._worth is None:
            return
        for request_id in scheduled:
            seen = self._seen.get(request_id)
            if seen is not None and not seen.computing and not seen.loading:
                request = seen.request
                seen.computing = self._clock()
                seen.tokens = request.num_tokens - request.num_computed_tokens
                if request.num_output_tokens == 0:
                    self._computing[request_id] = seen

    def ended(self, report: Report | None, received: Collection[str]) -> None:
        """A step is over.  `received`: requests whose loads are over too."""
        now = self._clock()
        if self._events is not None:
            self._events.reported(report, received)
        if report is not None and report.heads:
            self._heads |= report.heads
            heads = {head for groups in self._heads.values() for group in groups for head in group}
            self._tally.add("identity", 0.0, 0, status=key_identity(heads))
        failed = report.failed if report is not None else ()
        for request_id in received:
            seen = self._seen.get(request_id)
            if seen is not None and seen.loading:
                seconds = now - seen.load_began
                whole = request_id not in failed
                self._explain(request_id, "loaded", seen.loading, seconds)
                self._tally.add(
                    "load_wait", seconds, seen.loading // self._block_size, status="ok" if whole else "error"
                )
                if whole:
                    self._tally.add("hit_tokens", 0.0, seen.loading, status="pool")
                    if self._worth is not None:
                        self._worth.loaded(seen.loading, seconds)
                seen.loading = 0
        for request_id in [name for name, seen in self._computing.items() if seen.request.num_output_tokens]:
            seen = self._computing.pop(request_id)
            self._explain(request_id, "computed", seen.tokens, now - seen.computing)
            if self._worth is not None and seen.tokens > 0:
                self._worth.computed(seen.tokens, now - seen.computing)

    def _explain(self, request_id: str, what: str, tokens: int, seconds: float) -> None:
        logger.debug("kv_transfer request=%s %s=%d tokens in %.1f ms", request_id, what, tokens, seconds * 1e3)

    def finished(self, request_id: str) -> None:
        """A request is over.  Its first token may have come with this very step, so `ended` still sees it."""
        seen = self._seen.pop(request_id, None)
        if self._events is not None:
            self._events.finished(request_id)
        if seen is not None and not seen.request.num_output_tokens:
            self._computing.pop(request_id, None)

    def cleared(self) -> None:
        """This model's blocks were removed from the pool."""
        if self._events is not None:
            self._events.cleared()

    def take_events(self) -> Collection[Any]:
        """vLLM's KV events since the last call."""
        return self._events.take() if self._events is not None else ()
