"""vLLM's own MooncakeConnector (KV cache straight from a prefill to a decode instance), made to run everywhere.

Two things keep the class of vLLM 0.32 from it, and this one adds only what they need:

- Its worker asks torch for the index of its accelerator and hands it to `set_device`.  Where there is none, torch
  raises; on CPUs the index has no meaning, so 0 does.
- It collects statistics but brings no Prometheus metrics for them.  MultiConnector insists on the metrics of every
  connector that sends statistics, so a producer's API server would die with its first transfer.

It has vLLM's name because MultiConnector finds the statistics' class by the connector's name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_BYTES = tuple(float(1 << exponent) for exponent in range(16, 35, 2))  # 64 KiB to 16 GiB
_PIECES = (1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0)

# What the statistics call it, its metric, what it says, and a histogram's buckets.
_HISTOGRAMS = (
    ("transfer_duration", "vllm:mooncake_transfer_seconds", "Time of one transfer of KV cache to decode", _SECONDS),
    ("bytes_transferred", "vllm:mooncake_transfer_bytes", "Bytes of one transfer of KV cache to decode", _BYTES),
    ("num_descriptors", "vllm:mooncake_transfer_pieces", "Contiguous pieces of one transfer", _PIECES),
)
_COUNTERS = (
    ("num_failed_transfers", "vllm:mooncake_failed_transfers", "Transfers to decode that failed"),
    ("num_failed_recvs", "vllm:mooncake_failed_receives", "Requests of decode whose KV cache did not come"),
    ("num_kv_expired_reqs", "vllm:mooncake_expired_requests", "Prefilled requests that no decode asked for in time"),
)


class MooncakeConnector(mooncake_connector.MooncakeConnector):  # type: ignore[misc]  # vLLM is not there where types are checked
    """The connector; its settings and its protocol are vLLM's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        with _device_index():
            super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> "Metrics":
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class Metrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not there where types are checked
    """The statistics of all workers of one API server.  Producers count transfers, consumers what did not come."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._histograms = {
            statistic: metric_types[Histogram](name=name, documentation=text, labelnames=labelnames, buckets=buckets)
            for statistic, name, text, buckets in _HISTOGRAMS
        }
        self._counters = {
            statistic: metric_types[Counter](name=name, documentation=text, labelnames=labelnames)
            for statistic, name, text in _COUNTERS
        }
        for labels in per_engine_labelvalues.values():  # shown as 0 from the start
            for metric in (*self._histograms.values(), *self._counters.values()):
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for statistic, histogram in self._histograms.items():
            for value in transfer_stats_data.get(statistic, ()):
                histogram.labels(*labels).observe(value)
        for statistic, counter in self._counters.items():
            counter.labels(*labels).inc(len(transfer_stats_data.get(statistic, ())))


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
