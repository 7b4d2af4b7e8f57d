"""The scheduler's half: what to load, what of it came, what to save.

Runs on the scheduler's thread with every step, so it never waits: the master is asked by `lookup`, bytes are moved by
the workers, and what they have done arrives as `Report`s.
"""

import logging
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from mooncake.rpc.messages import Need
from mooncake.vllm.blocks import Blocks
from mooncake.vllm.groups import Groups
from mooncake.vllm.loading import Load, first_lost, plan_load, whole_until
from mooncake.vllm.lookup import Lookup, Lookups
from mooncake.vllm.plan import Report, StepPlan
from mooncake.vllm.saving import Saving
from mooncake.vllm.settings import Settings
from mooncake.vllm.stats import Tally
from mooncake.vllm.versions import Allocations

logger = logging.getLogger("vllm.mooncake")

_HEADS_LIMIT = 2.0  # seconds that a first request waits for the workers to say how their keys begin
_RESET_LIMIT = 5.0


class _Request:
    """What is known of a request that vLLM has not finished."""

    __slots__ = (
        "adapter_path", "arrived", "displaced", "limit", "loading", "lookup", "missing", "offer", "request",
        "restarted", "saved", "saved_tokens", "spared",
    )  # fmt: skip

    def __init__(self, request: Any, groups: int) -> None:
        lora = request.lora_request
        self.request = request
        self.adapter_path: str = lora.lora_path if lora is not None else ""
        self.arrived = time.monotonic()
        self.lookup: Lookup | None = None
        self.offer: tuple[int, int] | None = None  # (first unit, count) that vLLM was last told of
        self.loading: Load | None = None
        self.missing: set[int] = set()  # of the blocks it loads, counted through
        self.limit: int | None = None  # units; what is behind did not come though the pool said it had it
        self.saved = [0] * groups
        self.saved_tokens = 0
        self.spared = False  # its next start finds nothing cached, see `Allocations`
        self.restarted = False  # its blocks were taken back, and it has not been scheduled since
        self.displaced = False  # ... and vLLM still has it in the queue of those that hold blocks


class SchedulerHalf:
    def __init__(
        self, settings: Settings, lookups: Lookups, groups: Groups, num_blocks: int, workers: int, *, saves: bool,
        resumes: bool = True,
    ) -> None:  # fmt: skip
        """`resumes`: whether the rest of a prompt can be computed behind what was loaded; else nothing is."""
        self._budget = settings.lookup_budget_ms / 1e3
        self._lookups = lookups
        self._groups = groups
        self._unit = groups.unit
        self._num_blocks = num_blocks
        self._workers = workers
        self._saves = saves
        self._resumes = resumes
        self._heads: dict[int, list[list[str]]] = {}
        self._needs: list[Need] = []  # what a lookup asks for, once all heads are known
        self._requests: dict[str, _Request] = {}
        self._loads: dict[str, list[Blocks]] = {}  # of the step that is being scheduled
        self._loading: dict[bytes, str] = {}  # hash of a unit → the request that loads it
        self._loaded: list[list[bytes]] = []  # units of loads that ended since the last step
        self._allocations = Allocations()
        self.tally = Tally()
        self._saving = Saving(
            groups, max(1, num_blocks * settings.max_pinned_percent // 100), workers, lookups.adapter, self.tally,
            decoded=settings.save_decode_cache,
        )  # fmt: skip

    def bind(self, pool: Any, manager: Any = None) -> None:
        """vLLM's BlockPool, and its KVCacheManager if that is told."""
        self._saving.pins.pool = pool
        self._allocations.bind(pool, manager)

    # -- before a request is scheduled

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        """(tokens in the pool beyond the first `local`, whether they are loaded between steps); None: ask again."""
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = _Request(request, len(self._groups.all))
        state.offer = None
        if not self._resumes:
            return 0, False
        if state.displaced:
            state.displaced = False
            return None, False  # once: so it goes to the other queue, and does not keep out those that hold blocks
        lookup = state.lookup
        if lookup is not None and not lookup.answered and time.monotonic() - lookup.asked < self._budget:
            return None, False  # of a hundred requests that wait most are here, with every step
        first = local // self._unit
        last: int = min(self._groups.hashed(request), request.num_tokens - 1) // self._unit
        if state.limit is not None:
            last = min(last, state.limit)
        if last <= first or state.spared or (state.restarted and not self._has_twice(request)):
            return 0, False
        if len(self._heads) < self._workers:
            return (None if time.monotonic() - state.arrived < _HEADS_LIMIT else 0), False
        owner = self._loading.get(self._groups.hash_at(request, local + self._unit)) if self._loading else None
        if owner is not None and owner != request.request_id:
            return None, False  # what it needs is on its way already, and will be a local hit
        if lookup is None or not lookup.serves(first):
            lookup = state.lookup = self._ask(state, first, last)
            if not lookup.answered:
                return None, False
        if not lookup.answered:
            lookup.settle(0, "late")
        if not lookup.counted:
            self._count(lookup)
        count = lookup.end - first - self._groups.lag
        if count <= 0:
            return 0, False
        state.offer = first, count
        return count * self._unit, True

    def _has_twice(self, request: Any) -> bool:
        """Whether there are blocks for twice this request: vLLM keeps those free that a load which failed was to need,
        besides those of the next load, until the request has been scheduled."""
        needed: int = sum(-(-request.num_tokens // group.block_size) for group in self._groups.all)
        return 2 * needed < self._num_blocks - self._saving.pins.most

    def lookup(self, request_id: str) -> Lookup | None:
        """What is being asked, or was last answered, of a request that waits."""
        state = self._requests.get(request_id)
        return state.lookup if state is not None else None

    def _ask(self, state: _Request, first: int, last: int) -> Lookup:
        unit, grain = self._unit, self._groups.grain
        hashes = self._groups.hashes(state.request, first * unit, last * unit, grain)
        return self._lookups.ask(self._needs, first, hashes, state.adapter_path, unit // grain)

    def _count(self, lookup: Lookup) -> None:
        lookup.counted = True
        asked = len(lookup.hashes) // lookup.step
        if not lookup.reason:
            self._saving.known.forget(lookup.hashes[lookup.count * lookup.step :])
        self.tally.add(
            "lookup_exists",
            lookup.answered - lookup.asked,
            asked,
            status=lookup.reason or "ok",
            failed=asked - lookup.count,
        )

    def allocated(self, request: Any, ids: Sequence[list[int]], tables: Sequence[list[Any]], external: int) -> None:
        """vLLM gave a request its blocks (`ids` of `tables`, by group), of which `external` tokens are to be loaded, or
        none."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if state.spared:
            state.spared = request.skip_reading_prefix_cache = False
        if not external:
            state.restarted = False
        if logger.isEnabledFor(logging.DEBUG):
            self._explain(state, external)
        lookup = state.lookup
        if external and state.offer is not None and lookup is not None:
            first, count = state.offer
            count = min(count, -(-external // self._unit))
            hashes = lookup.hashes[(first - lookup.first) * lookup.step :]
            adapter = self._lookups.adapter(state.adapter_path) or ""
            start, end = first * self._unit, (first + count) * self._unit
            load = plan_load(self._groups, start, end, hashes, adapter, ids, tables)
            self._loads[request.request_id] = load.blocks
            state.loading = load
            self._loading |= dict.fromkeys(load.units, request.request_id)
        state.lookup = state.offer = None

    def _explain(self, state: _Request, external: int) -> None:
        """One line a start of a request: what it got from where, how long it waited, and why there was no more."""
        lookup = state.lookup
        logger.debug(
            "kv_transfer request=%s tokens=%d from_pool=%d waited_ms=%.1f asked_blocks=%d found_blocks=%d reason=%s",
            state.request.request_id,
            state.request.num_tokens,
            external,
            (time.monotonic() - state.arrived) * 1e3,
            len(lookup.hashes) // lookup.step if lookup is not None else 0,
            lookup.count if lookup is not None else 0,
            (lookup.reason or "answered") if lookup is not None else "not_asked",
        )

    # -- each step

    def plan(self, output: Any) -> StepPlan:
        """What the workers do in this step."""
        for units in self._loaded:
            for value in units:
                self._loading.pop(value, None)
        self._loaded = []
        plan = StepPlan(loads=self._loads, idle=not output.num_scheduled_tokens)
        self._loads = {}
        self._saving.tables.update(output)
        if self._saves and len(self._heads) == self._workers:
            self._saving.plan(output, self._requests, plan)
        return plan

    def report(self, report: Report | None, received: Iterable[str]) -> None:
        """What the workers did; `received`: requests whose loads are over on all of them."""
        if report is not None:
            self._take_heads(report.heads)
            for job, saved in report.saved.items():
                self._saving.end(job, saved)
            for request_id, missing in report.failed.items():
                state = self._requests.get(request_id)
                if state is not None:
                    state.missing |= missing
        for request_id in received:
            state = self._requests.get(request_id)
            if state is not None and state.loading is not None:
                self._end_load(state, state.loading)

    def _take_heads(self, heads: dict[int, list[list[str]]]) -> None:
        if heads:
            self._heads |= heads
        if heads and len(self._heads) == self._workers:
            workers = [self._heads[rank] for rank in sorted(self._heads)]
            by_group = [[head for each in workers for head in each[group.number]] for group in self._groups.all]
            self._needs = self._groups.needs(by_group)

    def _end_load(self, state: _Request, load: Load) -> None:
        """It is over on all workers: nobody writes to its blocks any more."""
        state.loading = None
        self._loaded.append(load.units)
        if state.missing:
            for blocks in load.blocks:
                self._saving.known.forget(blocks.hashes)
        if state.request.is_finished():
            del self._requests[state.request.request_id]
        elif state.missing:
            self._shorten(state, load)
        else:
            for blocks in load.blocks:
                self._saving.known.add(blocks.group, blocks.hashes)
        state.missing = set()

    def _shorten(self, state: _Request, load: Load) -> None:
        """Not all came: what is missing is computed.

        The request still waits for its load, and vLLM reads its number of computed tokens next when that is over.  So
        it needs no failure policy.  It goes on behind the longest prefix that is whole in all groups, or, if there is
        none in the blocks it has, starts anew: with what is cached, and what the pool has of the tokens before the
        first loss.
        """
        request = state.request
        whole = whole_until(self._groups, load, state.missing)
        if whole is not None:
            request.num_computed_tokens = min(request.num_computed_tokens, whole)
            self._allocations.unloaded(request, whole)
            return
        state.limit = first_lost(self._groups, load, state.missing) // self._unit
        skipped = request.skip_reading_prefix_cache
        self._allocations.release(request, load.tables)
        state.restarted = state.displaced = True
        state.spared = request.skip_reading_prefix_cache and not skipped

    # -- the end

    def finished(self, request_id: str) -> None:
        """A request is over; what it is loading still goes into its blocks, which vLLM keeps until then."""
        state = self._requests.get(request_id)
        if state is not None and state.loading is None:
            del self._requests[request_id]

    def busy(self) -> bool:
        """Whether blocks are pinned, which only further steps can change."""
        return bool(self._saving.pins)

    def reset(self) -> bool:
        """Remove this model's blocks from the pool; whether that was done.  Not while some are being saved."""
        self._saving.known.clear()
        for state in self._requests.values():
            state.lookup = None
        if self._saving.pins:
            logger.warning("Blocks are being saved; reset the cache when the engine is idle")
            return False
        if not self._needs:
            return True
        heads = "|".join(re.escape(head) for need in self._needs for head in need.heads)
        return self._lookups.remove(f"^({heads})", _RESET_LIMIT)

    def close(self) -> None:
        self._lookups.close()
