"""The workers' half: moves what the plans say, behind the forward passes, and reports.

Owns the membership in the pool and two threads.  A load's end is always reported, whatever happened to it; what it did
not bring is reported with it.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from mooncake.errors import ConfigError
from mooncake.mooncake_config import MooncakeConfig
from mooncake.vllm import identity
from mooncake.vllm.blocks import Blocks
from mooncake.vllm.device import Fence
from mooncake.vllm.layout import Layout
from mooncake.vllm.membership import Membership
from mooncake.vllm.movers import Job, Loader, Pool, Saver, Shard
from mooncake.vllm.plan import Report, Saved, StepPlan
from mooncake.vllm.settings import Settings
from mooncake.vllm.shards import cut_of, narrowed
from mooncake.vllm.stats import Sources, Tally

logger = logging.getLogger("vllm.mooncake")

_IDLE_WAIT = 0.001  # seconds


class WorkerHalf:
    def __init__(self, config: MooncakeConfig, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config = config
        self._settings = settings
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._stores: list[bool] = []  # by group; else another rank saves the same bytes
        self.tally = Tally()
        self._sources = Sources(self.tally)
        self._lock = threading.Condition()  # notified when a load ends
        self._loading = 0  # loads that go on
        self._report = Report()
        self._received: set[str] = set()
        self._membership: Membership | None = None
        self._device: Any = None

    def register(self, caches: Mapping[str, Any]) -> None:
        """The KV cache, by layer.  Raises ConfigError."""
        first = next(iter(caches.values()), None)
        if first is None:
            raise ConfigError("the model has no KV cache; a connector is of no use to it")
        self._device = (first[0] if isinstance(first, list | tuple) else first).device
        backends = identity.attention_backends(self._vllm_config)
        engine = identity.Identity(self._vllm_config, self._settings, backends)
        groups = self._kv_cache_config.kv_cache_groups
        shards = [self._shards(engine, index, group, caches) for index, group in enumerate(groups)]
        regions: dict[int, int] = {}
        for each in shards:
            for shard in each:
                regions |= shard.layout.regions
        self._stores = [any(shard.stores for shard in each) for each in shards]
        self._membership = Membership(self._config, regions)
        pool = Pool(self._membership, shards, self.tally)
        self._loader = Loader("mooncake-load", pool)
        self._saver = Saver("mooncake-save", pool)
        tensor, pipeline = identity.ranks(self._vllm_config)
        rank = pipeline * self._vllm_config.parallel_config.tensor_parallel_size + tensor
        self._report.heads[rank] = [[shard.head for shard in each] for each in shards]

    def _shards(self, engine: identity.Identity, index: int, group: Any, caches: Mapping[str, Any]) -> list[Shard]:
        """What this worker holds of a group's blocks; nothing if it has none of its layers."""
        mine = {name: caches[name] for name in group.layer_names if name in caches}
        if not mine:
            return []
        spec = group.kv_cache_spec
        tensor, _ = identity.ranks(self._vllm_config)
        cut = cut_of(self._vllm_config, spec, tensor, self._settings.shared_tp)
        shards = []
        for i in range(cut.held):
            layout = Layout(narrowed(mine, spec, i, cut.held), self._kv_cache_config.num_blocks)
            head = engine.key_head(index, spec, layout.text, cut.first + i, cut.total)
            shape = layout.shape
            logger.info(
                "Blocks of %d bytes in %d pieces are stored as %s...", shape.block_bytes, len(shape.sizes), head
            )
            shards.append(Shard(head, layout, cut.stores))
        return shards

    # -- each step

    def start_loads(self, plan: StepPlan) -> None:
        if not plan.loads:
            return
        fence = Fence(self._device)
        with self._lock:
            self._loading += len(plan.loads)
        for request_id, blocks in plan.loads.items():
            self._loader.add(Job(blocks, fence, self._load_ended(request_id)))

    def start_saves(self, plan: StepPlan) -> None:
        """The step's forward pass is over, or queued."""
        if not plan.saves:
            return
        mine = [blocks for blocks in plan.saves if self._stores[blocks.group]]
        if not mine:
            with self._lock:
                self._report.saved[plan.job] = Saved()
            return
        self._saver.add(Job(mine, Fence(self._device), self._save_ended(plan.job, plan.saves)))

    def take_received(self, idle: bool) -> set[str]:
        """Requests whose loads have ended since the last call; what they did not bring is in the next `take_report`.

        In an `idle` step a load's end is waited for a little: the engine hears of it sooner than if it looked again and
        again, and meanwhile the movers have the interpreter to themselves.
        """
        with self._lock:
            if idle and self._loading and not self._received:
                self._lock.wait(_IDLE_WAIT)
            received, self._received = self._received, set()
        return received

    def take_report(self) -> Report | None:
        with self._lock:
            report, self._report = self._report, Report()
        return report if report else None

    def look(self) -> None:
        """Bring the tally up to date."""
        if self._membership is not None:
            self._sources.look(self._membership.store)

    def close(self) -> None:
        if self._membership is None:
            return
        ended = [mover.close() for mover in (self._loader, self._saver)]
        if all(ended):
            self._membership.close()
        else:
            logger.warning("A copy is still going on; the pool is left without saying so")

    # -- in the movers' threads

    def _load_ended(self, request_id: str) -> Any:
        began = time.monotonic()

        def ended(codes: list[int]) -> None:
            missing = {i for i, code in enumerate(codes) if code}
            self.tally.skipped("load_skipped", codes)
            moved, taken = codes.count(0), (time.monotonic() - began) * 1e3
            logger.debug("kv_transfer request=%s moved=%d blocks in %.1f ms", request_id, moved, taken)
            with self._lock:
                if missing:
                    self._report.failed[request_id] = missing
                self._received.add(request_id)
                self._loading -= 1
                self._lock.notify()
            if missing:
                logger.info(
                    "Request %s: %d of %d blocks were not loaded (%s); they are computed",
                    request_id,
                    len(missing),
                    len(codes),
                    {codes[i] for i in missing},
                )

        return ended

    def _save_ended(self, job: int, saves: list[Blocks]) -> Any:
        def ended(codes: list[int]) -> None:
            self.tally.skipped("save_skipped", codes)
            told = iter(codes)
            at, failed = 0, set()
            for blocks in saves:
                if self._stores[blocks.group]:
                    failed |= {i for i in range(at, at + len(blocks.ids)) if next(told)}
                at += len(blocks.ids)
            with self._lock:
                self._report.saved[job] = Saved(1, failed)
            if failed:
                logger.debug("%d of %d blocks were not saved (%s)", len(failed), len(codes), set(codes) - {0})

        return ended
