"""Prometheus metrics of `MooncakeStoreConnector`: vLLM's own of that connector, and what those do not tell."""

from collections import defaultdict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import MooncakeStorePromMetrics

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_RATES = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 100.0)  # GB/s
_MOVES = {"load_get": "load", "save_put": "save"}
_WAITS = {"lookup_exists": "lookup", "load_wait": "load"}
_SKIPS = {"load_skipped": "load", "save_skipped": "save"}
_OWN = {"load_wait", "hit_tokens", "load_source", "load_skipped", "identity"}  # vLLM's metrics know the others


class Metrics(MooncakeStorePromMetrics):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Of all engines of one API server.  Tokens of pool hits are split by the memory that the bytes came from."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def counter(name: str, text: str, *labels: str) -> Any:
            return self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, *labels])

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Any:
            return self._histogram_cls(
                name=name, documentation=text, buckets=buckets, labelnames=[*labelnames, *labels]
            )

        self._tokens = counter(
            "vllm:mooncake_hit_tokens", "Prompt tokens that were not computed, by where they were", "tier", "source"
        )
        self._bytes = counter("vllm:mooncake_moved_bytes", "Bytes loaded from and saved to the pool", "direction")
        self._rates = histogram(
            "vllm:mooncake_gigabytes_per_second", "Rate of one batch of blocks", _RATES, "direction"
        )
        self._waits = histogram("vllm:mooncake_waited_seconds", "Time that a request waited", _SECONDS, "what")
        self._skips = counter(
            "vllm:mooncake_skipped_blocks", "Blocks that were not loaded or saved", "direction", "reason"
        )
        self._identity = self._gauge_cls(
            name="vllm:mooncake_identity_info",
            documentation="What must be equal in instances that share blocks: of how keys begin, and of the seed",
            labelnames=[*labelnames, "keys", "seed"],
        )
        # By engine: bytes by source, of loads whose tokens have not been counted yet.
        self._sources: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def observe(self, transfer_stats_data: dict[str, Any] | None, engine_idx: int = 0) -> None:
        data = transfer_stats_data or {}
        super().observe({name: records for name, records in data.items() if name not in _OWN}, engine_idx)
        labels = self.per_engine_labelvalues[engine_idx]
        for record in data.get("identity", ()):
            self._identity.labels(*labels, *str(record["status"]).split()).set(1)
        for record in data.get("load_source", ()):
            self._sources[engine_idx][record["status"]] += int(record["num_bytes"])
        for record in data.get("hit_tokens", ()):
            self._count_tokens(engine_idx, str(record["status"]), int(record["num_keys"]))
        for name, direction in _MOVES.items():
            for record in data.get(name, ()):
                size, seconds = int(record["num_bytes"]), float(record["duration_seconds"])
                if size:
                    self._bytes.labels(*labels, direction).inc(size)
                    self._rates.labels(*labels, direction).observe(size / max(seconds, 1e-6) / 1e9)
        for name, what in _WAITS.items():
            for record in data.get(name, ()):
                self._waits.labels(*labels, what).observe(float(record["duration_seconds"]))
        for record in data.get("lookup_exists", ()):
            if record["status"] != "ok":
                self._skips.labels(*labels, "load", f"lookup_{record['status']}").inc(int(record["num_keys"]))
        for name, direction in _SKIPS.items():
            for record in data.get(name, ()):
                self._skips.labels(*labels, direction, str(record["status"])).inc(int(record["num_failed_keys"]))

    def _count_tokens(self, engine_idx: int, tier: str, tokens: int) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        if tier != "pool":
            self._tokens.labels(*labels, tier, "local").inc(tokens)
            return
        sources = self._sources.pop(engine_idx, None) or {"unknown": 1}
        total = sum(sources.values())
        for source, size in sources.items():
            self._tokens.labels(*labels, tier, source).inc(tokens * size / total)
