"""vLLM's own MooncakeConnector, as `InTreeMooncakeConnector`, made to run everywhere.

Two things keep the class of vLLM 0.32 from it, and this one adds only what they need:

- Its worker asks torch for the index of its accelerator and hands it to `set_device`.  Where there is none, torch
  raises; on CPUs the index has no meaning, so 0 does.
- It collects statistics but brings no Prometheus metrics for them.  MultiConnector insists on the metrics of every
  connector that sends statistics, so a producer's API server would die with its first transfer.

The class has vLLM's name because MultiConnector finds the statistics' class by it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

from mooncake.vllm.push.stats import Metrics


class MooncakeConnector(mooncake_connector.MooncakeConnector):  # type: ignore[misc]  # vLLM is not there where types are checked
    """The connector; its settings and its protocol are vLLM's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        with _device_index():
            super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> Metrics:
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


@contextmanager
def _device_index() -> Iterator[None]:
    """Where there is no accelerator, torch says 0 for its index instead of raising."""
    if torch.accelerator.is_available():
        yield
        return
    original = torch.accelerator.current_device_index
    torch.accelerator.current_device_index = lambda: 0
    try:
        yield
    finally:
        torch.accelerator.current_device_index = original
