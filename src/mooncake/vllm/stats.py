"""What was done since the last step, for vLLM's metrics and its log.

The names are those of vLLM's own connector (`vllm:mooncake_store_operation_*`), so dashboards go on working:
`load_get` and `save_put` (bytes moved by a worker), `lookup_exists` (how long a request waited for the master, and why
in vain), and `save_skipped` (blocks that were not saved, and why).
"""

import threading
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
    MooncakeStoreConnectorStats,
    MooncakeStorePromMetrics,
)

__all__ = ["MooncakeStoreConnectorStats", "MooncakeStorePromMetrics", "Tally"]


class Tally:
    """Collects operations; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = MooncakeStoreConnectorStats()

    def add(
        self, operation: str, seconds: float, keys: int, *, size: int = 0, status: str = "ok", failed: int = 0
    ) -> None:
        """`size`: bytes moved.  `failed`: how many of the keys were in vain."""
        with self._lock:
            self._stats.record_operation(
                operation, seconds, keys, num_bytes=size, status=status, num_failed_keys=failed
            )

    def take(self) -> Any:
        """What was added since the last call, or None."""
        with self._lock:
            if self._stats.is_empty():
                return None
            stats, self._stats = self._stats, MooncakeStoreConnectorStats()
        return stats
