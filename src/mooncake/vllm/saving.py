"""What to save of each step, and which blocks are pinned meanwhile.

Owns the references (pins) on blocks that are being saved.  Runs on the scheduler's thread, so it looks at a bounded
number of blocks a step, and does per block only what a list comprehension can.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mooncake.vllm.blocks import Blocks
from mooncake.vllm.groups import Group, Groups
from mooncake.vllm.pins import Known, Pins
from mooncake.vllm.plan import Saved, StepPlan
from mooncake.vllm.stats import Tally
from mooncake.vllm.versions import BlockTables

_PLANNED_AT_ONCE = 4096  # blocks that one step looks at


class Saveable(Protocol):
    """A request.  `saved`: by group, how many blocks from the first on need no saving any more; `saved_tokens`: the
    same of all groups."""

    request: Any
    adapter_path: str
    saved: list[int]
    saved_tokens: int


class Saving:
    def __init__(
        self,
        groups: Groups,
        most_pinned: int,
        workers: int,
        adapter: Callable[[str], str | None],
        tally: Tally,
        *,
        decoded: bool,
    ) -> None:
        """`adapter`: what stands before the hashes of a LoRA adapter's blocks, by its path, if that is known yet.
        `decoded`: also save blocks that answers fill."""
        self._groups = groups
        self._adapter = adapter
        self._tally = tally
        self._decoded = decoded
        self.tables = BlockTables(len(groups.all))
        # Blocks that leave a window are gone with the next step; those of full attention stay.
        self._order = sorted((group for group in groups.all if not group.states), key=lambda group: not group.span)
        self._states = any(group.states for group in groups.all)
        self.known = Known(len(groups.all))
        self.pins = Pins(most_pinned, workers, len(groups.all))

    def plan(self, output: Any, requests: Mapping[str, Saveable], plan: StepPlan) -> None:
        """Add to the step's plan what is full after it and not in the pool.  `output`: vLLM's SchedulerOutput."""
        left = _PLANNED_AT_ONCE
        for request_id, tokens in output.num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is not None and left > 0:
                left -= self._plan_request(request_id, state, tokens, left, plan.saves)
        if self._states:
            for request_id, offers in self.tables.states(output).items():
                state = requests.get(request_id)
                if state is not None:
                    self._plan_states(state, offers, plan.saves)
        if plan.saves:
            plan.job = self.pins.begin(plan.saves)

    def end(self, job: int, outcome: Saved) -> None:
        for group, hashes in self.pins.end(job, outcome):
            self.known.add(group, hashes)

    def _plan_request(self, request_id: str, state: Saveable, tokens: int, most: int, saves: list[Blocks]) -> int:
        """How many blocks were looked at."""
        request, groups = state.request, self._groups
        end = min(groups.hashed(request), request.num_computed_tokens + tokens - groups.lag * groups.unit)
        end = self._last_place(request, end)
        if end <= state.saved_tokens:
            return 0
        adapter = self._adapter(state.adapter_path)
        if adapter is None:
            return 0
        table = self.tables.get(request_id)
        looked, whole = 0, True
        for group in self._order:
            # What left the window before this step may be another request's already.
            start = max(state.saved[group.number], group.first_needed(request.num_computed_tokens))
            stop = min(end // group.block_size, len(table[group.number]), start + most - looked)
            whole = whole and stop == end // group.block_size
            if stop > start:
                looked += stop - start
                stop, pinned = self._add(request, group, adapter, table[group.number], range(start, stop), saves)
                whole = whole and not pinned
                state.saved[group.number] = stop
        if whole:
            state.saved_tokens = end
        return looked

    def _last_place(self, request: Any, end: int) -> int:
        """The last place up to `end` at which another request could go on."""
        if not self._decoded:
            end = min(end, request.num_prompt_tokens)
        return end - end % self._groups.unit

    def _add(
        self, request: Any, group: Group, adapter: str, table: list[int], blocks: range, saves: list[Blocks]
    ) -> tuple[int, bool]:
        """Pin and add some blocks: (the first that is not through, whether there were too many pins for it)."""
        size = group.block_size
        hashes = self._groups.hashes(request, blocks.start * size, blocks.stop * size, size)
        ids = table[blocks.start : blocks.stop]
        useful = self._groups.useful(group, blocks)
        if useful is not blocks:
            hashes, ids = [hashes[i - blocks.start] for i in useful], [table[i] for i in useful]
        found = self.known.unknown(group.number, hashes, ids, self.pins.hashes[group.number])
        room = self.pins.room
        end = blocks.stop
        pinned = len(found) > room
        if pinned:
            end = blocks.start + table[blocks.start : blocks.stop].index(found[room][1])
            self._tally.add("save_skipped", 0.0, blocks.stop - end, status="pinned", failed=blocks.stop - end)
            del found[room:]
        if found:
            saved = Blocks(group.number, adapter, [value for value, _ in found], [block for _, block in found])
            self.pins.add(saved)
            saves.append(saved)
        return end, pinned

    def _plan_states(self, state: Saveable, offers: list[tuple[int, int, int]], saves: list[Blocks]) -> None:
        """Add states that vLLM offers, as (group, block id, tokens up to which it is the state)."""
        request, groups = state.request, self._groups
        adapter = self._adapter(state.adapter_path)
        if adapter is None:
            return
        for index, block, tokens in offers:
            group = groups.all[index]
            if tokens > groups.hashed(request) or self._last_place(request, tokens) != tokens:
                continue
            hashes = groups.hashes(request, tokens - group.block_size, tokens, group.block_size)
            if not self.known.unknown(index, hashes, [block], self.pins.hashes[index]):
                continue
            if self.pins.room < 1:
                self._tally.add("save_skipped", 0.0, 1, status="pinned", failed=1)
                continue
            saved = Blocks(index, adapter, hashes, [block])
            self.pins.add(saved)
            saves.append(saved)
