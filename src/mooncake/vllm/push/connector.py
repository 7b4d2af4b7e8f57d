"""MooncakeConnector: vLLM's connector interface, wired to the two halves.

vLLM makes one object in the scheduler's process and one in each worker; every method below belongs to one of the two.
Decode waits for its prompts between steps; no forward pass waits for a transfer.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.version import __version__ as vllm_version

from mooncake.vllm import versions
from mooncake.vllm.push.plan import PushPlan, PushReport
from mooncake.vllm.push.planning import Planner
from mooncake.vllm.push.settings import PushSettings
from mooncake.vllm.push.site import refuse_unsupported, site_of
from mooncake.vllm.push.stats import Metrics, PushStats, Tally
from mooncake.vllm.push.worker import Worker

versions.check_version(vllm_version)


class MooncakeConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not there where types are checked
    """KV cache straight from a prefill to a decode instance."""

    _cache_hit_source = versions.hit_source("P2P")

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        refuse_unsupported(vllm_config, kv_cache_config)
        settings = PushSettings.of(transfer.kv_connector_extra_config)
        hands, pulls = transfer.kv_role != "kv_consumer", transfer.kv_role != "kv_producer"
        self._tally = Tally()
        self._planner: Planner | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            resumes = versions.computes_behind_a_prefix(vllm_config)
            self._planner = Planner(vllm_config.cache_config.block_size, hands=hands, pulls=pulls, resumes=resumes)
        else:
            site = site_of(vllm_config, kv_cache_config, versions.own_address())
            self._worker = Worker(settings, site, self._tally, hands=hands, pulls=pulls)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # -- metrics

    def get_kv_connector_stats(self) -> Any:
        return self._tally.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return PushStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> Any:
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- scheduler

    @property
    def _plans(self) -> Planner:
        assert self._planner is not None
        return self._planner

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._plans.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._plans.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._plans.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        self._plans.report(
            report if isinstance(report, PushReport) else None,
            connector_output.finished_recving or (),
            connector_output.finished_sending or (),
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._plans.finished(request), None

    def has_pending_push_work(self) -> bool:
        return self._plans.busy()

    # -- worker

    @property
    def _half(self) -> Worker:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._half.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, PushPlan)
        self._half.withdraw(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._half.begin_step(self._plan())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._half.start_pulls(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._half.steps is not None:
            self._half.steps.layer(layer_name)

    def wait_for_save(self) -> None:
        if self._half.steps is not None:
            self._half.steps.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._half.take_sent() or None, self._half.take_received() or None

    def build_connector_worker_meta(self) -> Any:
        failed = self._half.take_failed()
        return PushReport(failed) if failed else None

    def _plan(self) -> PushPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, PushPlan)
        return plan
