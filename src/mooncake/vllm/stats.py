"""What was done since the last step, for vLLM's metrics and its log.

Records have the form of vLLM's own connector, so they pass through vLLM, `MultiConnector` too, and dashboards of its
`vllm:mooncake_store_operation_*` go on working.  Operations:

load_get, save_put       bytes moved by a worker
lookup_exists            how long a request waited for the master, and why in vain
load_wait                how long a request waited for a load, until the scheduler knew of its end
hit_tokens               tokens that a request did not compute; status: `gpu`, `pool`
load_source              bytes of loads; status: whose memory they came from
identity                 status: see `identity.key_identity`
load_skipped, save_skipped  blocks that were not loaded or saved; status: why
"""

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import MooncakeStoreConnectorStats

from mooncake.errors import ErrorCode

__all__ = ["MooncakeStoreConnectorStats", "Tally"]

# Whose memory a store's transports reach.
SOURCES = {"local": "own_memory", "shm": "same_host", "tcp": "other_host"}


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

    def skipped(self, operation: str, codes: Iterable[int]) -> None:
        """Count the blocks that have an error code, by the name of the error."""
        for code, count in Counter(code for code in codes if code).items():
            try:
                reason = ErrorCode(code).name.lower()
            except ValueError:
                reason = str(code)
            self.add(operation, 0.0, count, status=reason, failed=count)


class Sources:
    """Bytes that loads brought since the last look, by whose memory they came from."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._seen: dict[str, int] = {}

    def look(self, store: Any) -> None:
        """`store`: the MooncakeDistributedStore of this worker, or None while it has none."""
        if store is None:
            return
        for transport, size in store.read_stats().items():
            new = size - self._seen.get(transport, 0)
            self._seen[transport] = size
            if new > 0:
                self._tally.add("load_source", 0.0, 0, size=new, status=SOURCES.get(transport, transport))
