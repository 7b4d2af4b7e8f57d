"""What the master counted since it started, under the names of its metrics endpoint.

A plain dict so that counting costs 50 ns; only names of `RPCS` and `EVENTS` exist.
"""

from __future__ import annotations

_SINGLE = (
    "exist_key", "get_replica_list", "put_start", "put_end", "put_revoke", "remove", "remove_all",
    "remove_by_regex", "ping", "evict_disk_replica", "mount_segment", "unmount_segment", "remount_segment",
    "create_copy_task", "create_move_task", "query_task", "update_task",
)  # fmt: skip
_BATCH = (
    "batch_exist_key", "batch_get_replica_list", "batch_put_start", "batch_put_end", "batch_put_revoke",
    "batch_replica_clear",
)  # fmt: skip
_EVENTS = (
    "master_attempted_evictions_mem", "master_attempted_evictions_total",
    "master_successful_evictions_mem", "master_successful_evictions_total",
    "master_evicted_key_count", "master_evicted_key_count_mem",
    "master_evicted_size_bytes", "master_evicted_size_bytes_mem",
    "master_put_start_alloc_failures_total", "master_put_start_partial_allocations_total",
    "master_put_start_discard_cnt", "master_put_start_release_cnt",
    "mooncake_offload_failed_total", "mooncake_offload_forced_total", "mooncake_offload_refused_total",
    "mooncake_checksum_mismatches_total",
    "mooncake_drain_moved_total", "mooncake_drain_moved_bytes_total", "mooncake_drain_failed_total",
    "mooncake_disk_evicted_total", "file_cache_hit_nums_", "file_cache_hit_bytes_total",
    "master_promotion_admitted_total", "master_promotion_cancelled_total", "master_promotion_completed_bytes_total",
    "master_promotion_completed_total", "master_promotion_failed_total", "master_promotion_rejected_frequency_total",
    "master_promotion_rejected_watermark_total", "master_promotion_candidate_admitted_total",
    "master_promotion_candidate_dropped_limit_total", "master_promotion_candidate_expired_unevaluated_total",
    "master_promotion_candidate_recorded_total",
    "mooncake_kv_events_batches_total", "mooncake_kv_events_dropped_total", "mooncake_kv_events_published_total",
    "mooncake_kv_events_retold_total", "mooncake_kv_events_unparsed_keys_total",
    "mooncake_snapshots_written_total", "mooncake_snapshots_failed_total", "mooncake_snapshots_damaged_total",
    "mooncake_snapshot_restores_total", "mooncake_snapshot_restore_failures_total",
    "mem_cache_hit_nums_", "mem_cache_hit_bytes_total", "total_get_nums_", "valid_get_nums_",
)  # fmt: skip
VALUE_SIZE_CLASSES = 64


class Counters(dict[str, int]):
    """`counters[name] += n`.  Unknown names raise KeyError, so a typing error cannot invent a metric."""

    def __init__(self) -> None:
        super().__init__()
        for rpc in _SINGLE + _BATCH:
            self[f"master_{rpc}_requests_total"] = 0
            self[f"master_{rpc}_failures_total"] = 0
        for rpc in _BATCH:
            for what in ("items_total", "failed_items_total", "partial_successes_total"):
                self[f"master_{rpc}_{what}"] = 0
        for name in _EVENTS:
            self[name] = 0
        self.value_sizes = [0] * VALUE_SIZE_CLASSES
        """Completed puts by (size - 1).bit_length(): class n holds sizes ≤ 2**n."""
        self.snapshots: dict[str, int] = {}
        """Figures of the last snapshot, by the metrics' names."""
        self.value_bytes = 0
        """Sum of the sizes of all completed puts."""

    def request(self, rpc: str, items: int, failed: int) -> None:
        """Count one request of `items` keys, `failed` of which did not get what they asked for.

        Our wire has only batches; a request of exactly one key counts as the single form."""
        if items == 1:
            self.one(rpc, failed)
        else:
            self.batch(rpc, items, failed)

    def batch(self, rpc: str, items: int, failed: int) -> None:
        """Count one request in the batch form."""
        prefix = f"master_batch_{rpc}_"
        self[prefix + "requests_total"] += 1
        self[prefix + "items_total"] += items
        if failed:
            self[prefix + "failed_items_total"] += failed
            self[prefix + ("failures_total" if failed == items else "partial_successes_total")] += 1

    def one(self, rpc: str, failed: int) -> None:
        """Count one request of an RPC that has no batch form."""
        self[f"master_{rpc}_requests_total"] += 1
        if failed:
            self[f"master_{rpc}_failures_total"] += 1
