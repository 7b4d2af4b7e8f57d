"""KV events: which blocks this engine has put into the pool, and which it has found gone.

vLLM publishes them (`--kv-events-config`) beside its own of the GPU's cache, so a router can tell where a prompt's KV
cache lies.  Everything is seen on the scheduler's side: a save is told when all ranks have made it; a block is told as
removed when a look-up or a load shows that it is gone, or when the cache is reset.  Blocks that other engines saved are
theirs to tell.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from mooncake.vllm.lookup import Lookup
from mooncake.vllm.plan import Report, StepPlan

MEDIUM = "CPU"  # vLLM's word for memory that is not a GPU's
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
    def __init__(self, block_size: int, hash_size: int, workers: int) -> None:
        """Sizes in tokens, `hash_size` divides `block_size`."""
        self._block_size = block_size
        self._hash_size = hash_size
        self._workers = workers
        self._requests: dict[str, _Hashes] = {}
        # Of saves under way: each block's hash and event (None: of a request that is over), what failed, ranks to come.
        self._jobs: dict[int, tuple[list[tuple[bytes, BlockStored | None]], set[int], list[int]]] = {}
        self._loads: dict[str, list[bytes]] = {}
        self._told: dict[bytes, None] = {}  # in the order in which they were told
        self._events: list[Any] = []

    # -- what happens

    def add(self, request: Any) -> None:
        self._requests[request.request_id] = _Hashes(request)

    def answered(self, lookup: Lookup | None) -> None:
        """What the master says of a request: the first block that it does not have is gone."""
        if lookup is not None and lookup.answered and not lookup.reason:
            self.gone(lookup.hashes[lookup.count : lookup.count + 1])

    def finished(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def planned(self, plan: StepPlan, scheduled: Iterable[str]) -> None:
        """A step begins, with loads, and at its end saves of blocks of `scheduled` requests."""
        for request_id, blocks in plan.loads.items():
            self._loads[request_id] = blocks.hashes
        if not plan.saves:
            return
        known = [self._requests[name] for name in scheduled if name in self._requests]
        for hashes in known:
            hashes.refresh()
        stored: list[tuple[bytes, BlockStored | None]] = []
        for blocks in plan.saves:
            owner = next((each for each in known if blocks.hashes[0] in each.places), None)
            stored += [(value, self._stored(owner, value) if owner is not None else None) for value in blocks.hashes]
        self._jobs[plan.job] = stored, set(), [self._workers]

    def reported(self, report: Report | None, received: Iterable[str]) -> None:
        """What the workers have done: jobs that all have done are told; loads that did not bring all show what is gone.

        `received`: requests whose loads are over."""
        for request_id, index in report.failed.items() if report is not None else ():
            self.gone(self._loads.get(request_id, [])[index : index + 1])
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
            for i, (value, event) in enumerate(stored):
                if i not in failed and event is not None and value not in self._told:
                    self._told[value] = None
                    self._add(event)
        if len(self._told) > MOST_TOLD:
            self.gone(list(islice(self._told, len(self._told) - MOST_TOLD)))

    def gone(self, hashes: Sequence[bytes]) -> None:
        """These are not in the pool any more."""
        told = [value for value in hashes if value in self._told]
        for value in told:
            del self._told[value]
        if told:
            self._events.append(BlockRemoved(block_hashes=[*map(maybe_convert_block_hash, told)], medium=MEDIUM))

    def cleared(self) -> None:
        """All of this model's blocks were removed.  That vLLM's own cache is empty then, it tells itself."""
        self.gone([*self._told])

    def take(self) -> Collection[Any]:
        events, self._events = self._events, []
        return events

    # -- inside

    def _stored(self, owner: _Hashes, value: bytes) -> BlockStored:
        request, each = owner.request, self._block_size // self._hash_size
        place = owner.places[value]
        end = (place + 1) * self._hash_size
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(value)],
            parent_block_hash=maybe_convert_block_hash(request.block_hashes[place - each]) if place >= each else None,
            token_ids=list(request.all_token_ids[end - self._block_size : end]),
            block_size=self._block_size,
            lora_id=lora.adapter_id if lora is not None else None,
            medium=MEDIUM,
            lora_name=lora.name if lora is not None else None,
        )

    def _add(self, event: BlockStored) -> None:
        """As one event with the last one, if its block follows on that one's."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == event.parent_block_hash:
            last.block_hashes += event.block_hashes
            last.token_ids += event.token_ids
        else:
            self._events.append(event)
