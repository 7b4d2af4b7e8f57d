"""KV events: which blocks this engine has put into the pool, and which it has found gone.

vLLM publishes them (`--kv-events-config`) beside its own of the GPU's cache, so a router can tell where a prompt's KV
cache lies.  Everything is seen on the scheduler's side: a save is told when all ranks have made it; a block is told as
removed when a look-up or a load shows that it is gone, or when the cache is reset.  Blocks that other engines saved are
theirs to tell.  Of a model with several groups of layers each group's blocks are told, with the group's number; of its
look-ups nothing is told, since they do not say whose block is gone.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from mooncake.vllm.groups import Groups
from mooncake.vllm.lookup import Lookup
from mooncake.vllm.plan import Report, StepPlan

MEDIUM = "CPU"  # vLLM's word for memory that is not a GPU's
Key = tuple[int, bytes]  # group and hash of a block
MOST_TOLD = 1_000_000  # blocks; of those before, nothing more is known, so they are told as removed


class _Hashes:
    """Where in a request each of its hashes is."""

    __slots__ = ("places", "request")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.places: dict[bytes, int] = {}

    def refresh(self) -> None:
        hashes = self.request.block_hashes
        for place in range(len(self.places), len(hashes)):
            self.places[hashes[place]] = place


class Events:
    def __init__(self, groups: Groups, workers: int) -> None:
        self._groups = groups
        self._hash_size = groups.hash_size
        self._workers = workers
        self._requests: dict[str, _Hashes] = {}
        # Of saves under way: each block's key and event (None: of a request that is over), what failed, ranks to come.
        self._jobs: dict[int, tuple[list[tuple[Key, BlockStored | None]], set[int], list[int]]] = {}
        self._loads: dict[str, list[Key]] = {}
        self._told: dict[Key, None] = {}  # in the order in which they were told
        self._events: list[Any] = []

    # -- what happens

    def add(self, request: Any) -> None:
        self._requests[request.request_id] = _Hashes(request)

    def answered(self, lookup: Lookup | None) -> None:
        """What the master says of a request: the first block that it does not have is gone."""
        alone = len(self._groups.all) == 1 and not self._groups.all[0].span
        if alone and lookup is not None and lookup.answered and not lookup.reason:
            self.gone([(0, value) for value in lookup.hashes[lookup.count : lookup.count + 1]])

    def finished(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def planned(self, plan: StepPlan, scheduled: Iterable[str]) -> None:
        """A step begins, with loads, and at its end saves of blocks of `scheduled` requests."""
        for request_id, loads in plan.loads.items():
            self._loads[request_id] = [(blocks.group, value) for blocks in loads for value in blocks.hashes]
        if not plan.saves:
            return
        known = [self._requests[name] for name in scheduled if name in self._requests]
        for hashes in known:
            hashes.refresh()
        stored: list[tuple[Key, BlockStored | None]] = []
        for blocks in plan.saves:
            # Who has the last has all: hashes are chained.
            owner = next((each for each in known if blocks.hashes[-1] in each.places), None)
            for value in blocks.hashes:
                event = self._stored(owner, blocks.group, value) if owner is not None else None
                stored.append(((blocks.group, value), event))
        self._jobs[plan.job] = stored, set(), [self._workers]

    def reported(self, report: Report | None, received: Iterable[str]) -> None:
        """What the workers have done: jobs that all have done are told; loads that did not bring all show what is gone.

        `received`: requests whose loads are over."""
        for request_id, missing in report.failed.items() if report is not None else ():
            self.gone([key for i, key in enumerate(self._loads.get(request_id, [])) if i in missing])
        for request_id in received:
            self._loads.pop(request_id, None)
        for job, saved in report.saved.items() if report is not None else ():
            entry = self._jobs.get(job)
            if entry is None:
                continue
            stored, failed, left = entry
            failed |= saved.failed
            left[0] -= saved.ranks
            if left[0] > 0:
                continue
            del self._jobs[job]
            for i, (key, event) in enumerate(stored):
                if i not in failed and event is not None and key not in self._told:
                    self._told[key] = None
                    self._add(event)
        if len(self._told) > MOST_TOLD:
            self.gone(list(islice(self._told, len(self._told) - MOST_TOLD)))

    def gone(self, keys: Sequence[Key]) -> None:
        """These are not in the pool any more."""
        told: dict[int, list[bytes]] = {}
        for key in keys:
            if key in self._told:
                del self._told[key]
                told.setdefault(key[0], []).append(key[1])
        for group, hashes in told.items():
            removed = [*map(maybe_convert_block_hash, hashes)]
            self._events.append(BlockRemoved(block_hashes=removed, medium=MEDIUM, group_idx=self._number(group)))

    def cleared(self) -> None:
        """All of this model's blocks were removed.  That vLLM's own cache is empty then, it tells itself."""
        self.gone([*self._told])

    def take(self) -> Collection[Any]:
        events, self._events = self._events, []
        return events

    # -- inside

    def _number(self, group: int) -> int | None:
        return group if len(self._groups.all) > 1 else None

    def _stored(self, owner: _Hashes, group: int, value: bytes) -> BlockStored:
        size = self._groups.all[group].block_size
        request, each = owner.request, size // self._hash_size
        place = owner.places[value]
        end = (place + 1) * self._hash_size
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(value)],
            parent_block_hash=maybe_convert_block_hash(request.block_hashes[place - each]) if place >= each else None,
            token_ids=list(request.all_token_ids[end - size : end]),
            block_size=size,
            lora_id=lora.adapter_id if lora is not None else None,
            medium=MEDIUM,
            lora_name=lora.name if lora is not None else None,
            group_idx=self._number(group),
        )

    def _add(self, event: BlockStored) -> None:
        """As one event with the last one, if its block follows on that one's."""
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and last.block_hashes[-1] == event.parent_block_hash
            and last.group_idx == event.group_idx
        ):
            last.block_hashes += event.block_hashes
            last.token_ids += event.token_ids
        else:
            self._events.append(event)
