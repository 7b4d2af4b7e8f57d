"""The scheduler's half: what to load, what to save, which blocks are pinned meanwhile.

Runs on the scheduler's thread with every step, so it never waits: the master is asked by `lookup`, bytes are moved by
the workers, and what they have done arrives as `Report`s.  Owns the references (pins) on blocks that are being saved.
"""

import logging
import re
import time
from collections.abc import Iterable
from typing import Any

from mooncake.vllm.blocks import Blocks
from mooncake.vllm.lookup import Lookup, Lookups
from mooncake.vllm.pins import Known, Pins
from mooncake.vllm.plan import Report, StepPlan
from mooncake.vllm.settings import Settings
from mooncake.vllm.stats import Tally
from mooncake.vllm.versions import BlockTables

logger = logging.getLogger("vllm.mooncake")

_HEADS_LIMIT = 2.0  # seconds that a first request waits for the workers to say how their keys begin
_PLANNED_AT_ONCE = 2048  # blocks that one step looks at for saving
_RESET_LIMIT = 5.0


class _Request:
    """What is known of a request that vLLM has not finished."""

    __slots__ = ("adapter_path", "arrived", "loading", "lookup", "offer", "request", "saved", "spared")

    def __init__(self, request: Any) -> None:
        lora = request.lora_request
        self.request = request
        self.adapter_path: str = lora.lora_path if lora is not None else ""
        self.arrived = time.monotonic()
        self.lookup: Lookup | None = None
        self.offer: tuple[int, int] | None = None  # (first block, count) that vLLM was last told of
        self.loading: tuple[int, list[bytes]] | None = None  # (first block, hashes)
        self.saved = 0  # blocks from the first on that need no saving any more
        self.spared = False  # its next start shall find nothing cached, see `_shorten`


class SchedulerHalf:
    def __init__(
        self,
        settings: Settings,
        lookups: Lookups,
        block_size: int,
        hash_size: int,
        num_blocks: int,
        workers: int,
        *,
        saves: bool,
        lag: int,
    ) -> None:
        """Sizes in tokens; `hash_size` divides `block_size`.  `lag`: how many last blocks of a prompt are neither saved
        nor loaded, 1 if a speculator writes a block's last place only with the next block."""
        self._settings = settings
        self._budget = settings.lookup_budget_ms / 1e3
        self._lookups = lookups
        self._block_size = block_size
        self._hashes_each = block_size // hash_size
        self._workers = workers
        self._saves = saves
        self._lag = lag
        self._heads: dict[int, str] = {}
        self._unique_heads: list[str] = []
        self._requests: dict[str, _Request] = {}
        self._loads: dict[str, Blocks] = {}  # of the step that is being scheduled
        self._loading: dict[bytes, str] = {}  # hash → the request that loads it
        self._loaded: list[list[bytes]] = []  # loads that ended since the last step
        self._known = Known()
        self._pins = Pins(max(1, num_blocks * settings.max_pinned_percent // 100), workers)
        self._tables = BlockTables()
        self.tally = Tally()

    def bind(self, pool: Any) -> None:
        self._pins.pool = pool

    # -- before a request is scheduled

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        """(tokens in the pool beyond the first `local`, whether they are loaded between steps); None: ask again."""
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = _Request(request)
        state.offer = None
        first = local // self._block_size
        last = min(len(request.block_hashes) // self._hashes_each, (request.num_tokens - 1) // self._block_size)
        if last <= first or state.spared:
            return 0, False
        if len(self._heads) < self._workers:
            return (None if time.monotonic() - state.arrived < _HEADS_LIMIT else 0), False
        owner = self._loading.get(self._hash(request, first))
        if owner is not None and owner != request.request_id:
            return None, False  # what it needs is on its way already, and will be a local hit
        lookup = state.lookup
        if lookup is None or not lookup.serves(first):
            hashes = request.block_hashes[
                self._hashes_each * (first + 1) - 1 : self._hashes_each * last : self._hashes_each
            ]
            lookup = self._lookups.ask(self._unique_heads, first, hashes, state.adapter_path)
            state.lookup = lookup
        if not lookup.answered:
            if time.monotonic() - lookup.asked < self._budget:
                return None, False
            lookup.settle(0, "late")
        if not lookup.counted:
            lookup.counted = True
            self.tally.add(
                "lookup_exists",
                lookup.answered - lookup.asked,
                len(lookup.hashes),
                status=lookup.reason or "ok",
                failed=len(lookup.hashes) - lookup.count,
            )
        count = lookup.end - first - self._lag
        if count <= 0:
            return 0, False
        state.offer = first, count
        return count * self._block_size, True

    def lookup(self, request_id: str) -> Lookup | None:
        """What is being asked, or was last answered, of a request that waits."""
        state = self._requests.get(request_id)
        return state.lookup if state is not None else None

    def allocated(self, request: Any, block_ids: list[int], external: int) -> None:
        """vLLM gave a request its blocks, of which `external` tokens are to be loaded, or none."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if state.spared:
            state.spared = request.skip_reading_prefix_cache = False
        if logger.isEnabledFor(logging.DEBUG):
            self._explain(state, external)
        if external and state.offer is not None and state.lookup is not None:
            first, count = state.offer
            count = min(count, -(-external // self._block_size))
            at = first - state.lookup.first
            hashes = state.lookup.hashes[at : at + count]
            adapter = self._lookups.adapter(state.adapter_path) or ""
            self._loads[request.request_id] = Blocks(adapter, hashes, block_ids[first : first + count])
            state.loading = first, hashes
            for value in hashes:
                self._loading[value] = request.request_id
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
            len(lookup.hashes) if lookup is not None else 0,
            lookup.count if lookup is not None else 0,
            (lookup.reason or "answered") if lookup is not None else "not_asked",
        )

    # -- each step

    def plan(self, output: Any) -> StepPlan:
        """What the workers do in this step."""
        for hashes in self._loaded:
            for value in hashes:
                self._loading.pop(value, None)
        self._loaded = []
        plan = StepPlan(loads=self._loads)
        self._loads = {}
        self._tables.update(output)
        if self._saves and len(self._heads) == self._workers:
            left = _PLANNED_AT_ONCE
            for request_id, tokens in output.num_scheduled_tokens.items():
                state = self._requests.get(request_id)
                if state is not None and left > 0:
                    left -= self._plan_saves(state, tokens, left, plan.saves)
            if plan.saves:
                plan.job = self._pins.begin(plan.saves)
        return plan

    def _plan_saves(self, state: _Request, tokens: int, most: int, saves: list[Blocks]) -> int:
        """Add what of a request is full after this step and not in the pool; how many blocks were looked at."""
        request, each = state.request, self._hashes_each
        full: int = min(
            len(request.block_hashes) // each, (request.num_computed_tokens + tokens) // self._block_size - self._lag
        )
        if not self._settings.save_decode_cache:
            full = min(full, request.num_prompt_tokens // self._block_size)
        full = min(full, state.saved + most)
        if full <= state.saved:
            return 0
        adapter = self._lookups.adapter(state.adapter_path)
        if adapter is None:
            return 0
        table = self._tables.get(request.request_id)
        start = state.saved
        hashes: list[bytes] = []
        ids: list[int] = []
        for i in range(start, min(full, len(table))):
            value = self._hash(request, i)
            if table[i] and value not in self._known and self._pins.wanted(value):
                if len(hashes) >= self._pins.room:
                    self.tally.add("save_skipped", 0.0, full - i, status="pinned", failed=full - i)
                    break
                hashes.append(value)
                ids.append(table[i])
            state.saved = i + 1
        if hashes:
            self._pins.add(hashes, ids)
            saves.append(Blocks(adapter, hashes, ids))
        return full - start

    def report(self, report: Report | None, received: Iterable[str]) -> None:
        """What the workers did; `received`: requests whose loads are over on all of them."""
        if report is not None:
            self._take_heads(report.heads)
            for job, saved in report.saved.items():
                self._known.add(self._pins.end(job, saved))
            for request_id, index in report.failed.items():
                self._shorten(request_id, index)
        for request_id in received:
            state = self._requests.get(request_id)
            if state is not None and state.loading is not None:
                self._end_load(state)

    def _take_heads(self, heads: dict[int, str]) -> None:
        if heads:
            self._heads |= heads
            self._unique_heads = list(dict.fromkeys(self._heads[rank] for rank in sorted(self._heads)))

    def _shorten(self, request_id: str, index: int) -> None:
        """A load brought only its first `index` blocks: the rest is computed.

        The request still waits for its load, and vLLM reads its number of computed tokens next when that is over.  So
        it needs no failure policy, and nothing but what is missing is computed again.
        """
        state = self._requests.get(request_id)
        if state is None or state.loading is None or state.request.is_finished():
            return
        first, hashes = state.loading
        state.loading = first, hashes[:index]
        self._loaded.append(hashes[index:])
        request = state.request
        request.num_computed_tokens = min(request.num_computed_tokens, (first + index) * self._block_size)
        if not request.num_computed_tokens and not request.skip_reading_prefix_cache:
            # It starts anew, in the blocks it has: it must not be given cached ones beside them.
            state.spared = request.skip_reading_prefix_cache = True

    def _end_load(self, state: _Request) -> None:
        assert state.loading is not None
        _, hashes = state.loading
        self._known.add(hashes)
        self._loaded.append(hashes)
        state.loading = None
        if state.request.is_finished():
            del self._requests[state.request.request_id]

    # -- the end

    def finished(self, request_id: str) -> None:
        """A request is over; what it is loading still goes into its blocks, which vLLM keeps until then."""
        state = self._requests.get(request_id)
        if state is not None and state.loading is None:
            del self._requests[request_id]

    def busy(self) -> bool:
        """Whether blocks are pinned, which only further steps can change."""
        return bool(self._pins)

    def reset(self) -> bool:
        """Remove this model's blocks from the pool; whether that was done.  Not while some are being saved."""
        self._known.clear()
        for state in self._requests.values():
            state.lookup = None
        if self._pins:
            logger.warning("Blocks are being saved; reset the cache when the engine is idle")
            return False
        if not self._heads:
            return True
        heads = "|".join(map(re.escape, self._unique_heads))
        return self._lookups.remove(f"^({heads})", _RESET_LIMIT)

    def close(self) -> None:
        self._lookups.close()

    def _hash(self, request: Any, block: int) -> bytes:
        """vLLM chains hashes: that of a block's last part names all tokens up to its end."""
        value: bytes = request.block_hashes[self._hashes_each * (block + 1) - 1]
        return value
