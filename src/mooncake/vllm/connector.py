"""MooncakeStoreConnector: vLLM's connector interface, wired to the two halves.

vLLM makes one object in the scheduler's process and one in each worker; every method below belongs to one of the two.
Loads always go on between steps (asynchronous), so no forward pass waits for the pool, and no hook inside the model is
used.
"""

from collections.abc import Collection
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.version import __version__ as vllm_version

from mooncake.client.prefixes import PrefixClient
from mooncake.vllm import identity, versions
from mooncake.vllm.events import Events
from mooncake.vllm.groups import Groups
from mooncake.vllm.lookup import Lookups
from mooncake.vllm.metrics import Metrics
from mooncake.vllm.plan import Report, StepPlan
from mooncake.vllm.scheduler import SchedulerHalf
from mooncake.vllm.settings import Settings, read_pool_config
from mooncake.vllm.stats import MooncakeStoreConnectorStats
from mooncake.vllm.watch import Watch
from mooncake.vllm.worker import WorkerHalf
from mooncake.vllm.worth import Worth

versions.check_version(vllm_version)

_MASTER_LIMIT = 1.0  # seconds for one answer of the master, which the scheduler does not wait for


class MooncakeStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not there where types are checked
    """A pool as a cache behind vLLM's own prefix cache."""

    _cache_hit_source = versions.hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        identity.refuse_unsupported(vllm_config, kv_cache_config)
        settings = Settings.of(transfer.kv_connector_extra_config)
        config = read_pool_config()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            versions.share_block_hashes(str(vllm_config.cache_config.prefix_caching_hash_algo))
            block_size, hash_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
            speculative, world = vllm_config.speculative_config, vllm_config.parallel_config.world_size
            lag = 1 if speculative is not None and speculative.use_eagle() else 0
            groups = Groups.of(kv_cache_config, block_size, hash_size, lag)
            self._scheduler = SchedulerHalf(
                settings,
                Lookups(PrefixClient(config.master_server_address, _MASTER_LIMIT, config.tenant_id)),
                groups,
                kv_cache_config.num_blocks,
                world,
                saves=transfer.kv_role != "kv_consumer",
                resumes=versions.computes_behind_a_prefix(vllm_config),
            )
            worth = Worth() if settings.decline_slow_loads else None
            events = vllm_config.kv_events_config
            events = Events(groups, world) if events and events.enable_kv_cache_events else None
            self._watch = Watch(self._scheduler.tally, block_size, worth, events)
        else:
            self._worker = WorkerHalf(config, settings, vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a save that does not happen is a miss later."""
        return False

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    # -- metrics, of both

    def get_kv_connector_stats(self) -> Any:
        if self._worker is not None:
            self._worker.look()
        half = self._scheduler or self._worker
        return half.tally.take() if half is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return MooncakeStoreConnectorStats(data=data) if data is not None else MooncakeStoreConnectorStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> Any:
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- scheduler

    @property
    def _planner(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._planner.bind(gpu_block_pool)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._planner.bind(kv_cache_manager.block_pool, kv_cache_manager)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        offer = self._planner.matched(request, num_computed_tokens)
        if offer[0] is None:
            return offer  # with every step, of all requests that wait: nothing is to be seen yet
        return self._watch.offered(request, num_computed_tokens, offer, self._planner.lookup(request.request_id))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = blocks.get_block_ids() if num_external_tokens else ()
        self._planner.allocated(request, ids, blocks.blocks, num_external_tokens)
        self._watch.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        plan = self._planner.plan(scheduler_output)
        self._watch.planned(plan, scheduler_output.num_scheduled_tokens)
        return plan

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        report = report if isinstance(report, Report) else None
        received = connector_output.finished_recving or ()
        self._planner.report(report, received)
        self._watch.ended(report, received)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._planner.finished(request.request_id)
        self._watch.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        return self._planner.busy()

    def reset_cache(self) -> bool | None:
        if self._scheduler is None:
            return None
        done = self._scheduler.reset()
        if done:
            self._watch.cleared()
        return done

    def take_events(self) -> Collection[Any]:
        return self._watch.take_events()

    # -- worker

    @property
    def _mover(self) -> WorkerHalf:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._mover.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._mover.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        self._mover.start_saves(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._mover.take_received(self._plan().idle) or None

    def build_connector_worker_meta(self) -> Report | None:
        return self._mover.take_report()

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan
