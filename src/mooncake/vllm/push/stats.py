"""What was pushed and pulled since the last step, for vLLM's log and metrics.

The statistics have the names that vLLM's own connector gives them: MultiConnector puts those of a connector together
by its class's name, with vLLM's own class.
"""

import threading
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

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
_NAMES = tuple(each[0] for each in (*_HISTOGRAMS, *_COUNTERS))


def _nothing() -> dict[str, list[float]]:
    return {name: [] for name in _NAMES}


class PushStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there where types are checked
    """A list for each statistic: of values, or of a 1 for each time."""

    data: dict[str, list[float]]

    def __init__(self, data: dict[str, list[float]] | None = None) -> None:
        super().__init__(data=data or _nothing())

    def reset(self) -> None:
        self.data = _nothing()

    def aggregate(self, other: KVConnectorStats) -> "PushStats":
        for name in _NAMES:
            self.data[name] = [*self.data.get(name, ()), *other.data.get(name, ())]
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        seconds, size = sum(self.data["transfer_duration"]), sum(self.data["bytes_transferred"])
        return {
            "Transfers": len(self.data["bytes_transferred"]),
            "MB": round(size / 1e6, 3),
            "GB/s": round(size / seconds / 1e9, 3) if seconds else 0.0,
            "Failed transfers": len(self.data["num_failed_transfers"]),
            "Failed receives": len(self.data["num_failed_recvs"]),
            "Expired requests": len(self.data["num_kv_expired_reqs"]),
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Tally:
    """Collects them; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = PushStats()

    def sent(self, seconds: float, size: int, pieces: int) -> None:
        """A prompt was pushed to one worker of decode: the sum of its copies' times, bytes, contiguous pieces."""
        with self._lock:
            self._stats.data["transfer_duration"].append(seconds)
            self._stats.data["bytes_transferred"].append(size)
            self._stats.data["num_descriptors"].append(pieces)

    def failed_to_send(self) -> None:
        self._add("num_failed_transfers")

    def failed_to_receive(self) -> None:
        self._add("num_failed_recvs")

    def expired(self) -> None:
        self._add("num_kv_expired_reqs")

    def _add(self, name: str) -> None:
        with self._lock:
            self._stats.data[name].append(1)

    def take(self) -> PushStats | None:
        """What was added since the last call, or None."""
        with self._lock:
            if self._stats.is_empty():
                return None
            stats, self._stats = self._stats, PushStats()
        return stats


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
