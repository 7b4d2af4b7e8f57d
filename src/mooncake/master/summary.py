"""One line that says how the master does: for /metrics/summary and for the log line every 10 seconds.

It is made from the metrics' values alone; rates are the change since the same object made its last line.
"""

import time
from collections.abc import Callable, Mapping

_SINGLE = {
    "PutStart": "put_start",
    "PutEnd": "put_end",
    "PutRevoke": "put_revoke",
    "Get": "get_replica_list",
    "Exist": "exist_key",
    "Del": "remove",
    "DelAll": "remove_all",
    "Ping": "ping",
    "CopyStart": "copy_start",
    "CopyEnd": "copy_end",
    "CopyRevoke": "copy_revoke",
    "MoveStart": "move_start",
    "MoveEnd": "move_end",
    "MoveRevoke": "move_revoke",
    "EvictDiskReplica": "evict_disk_replica",
}
_BATCH = {
    "PutStart": "batch_put_start",
    "PutEnd": "batch_put_end",
    "PutRevoke": "batch_put_revoke",
    "Get": "batch_get_replica_list",
    "ExistKey": "batch_exist_key",
    "QueryIp": "batch_query_ip",
    "Clear": "batch_replica_clear",
}
_TASKS = {
    "CreateMoveTask": "create_move_task",
    "CreateCopyTask": "create_copy_task",
    "QueryTask": "query_task",
    "FetchTasks": "fetch_tasks",
    "MarkTaskToComplete": "update_task",
}
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


class Summary:
    """Makes the lines; `read` gives the value of every metric without labels, by name."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read
        self._last: Mapping[str, float] = {}
        self._last_at = time.monotonic()

    def line(self) -> str:
        """`role=…, state=…, service_ready=…, master={…}, ha={…}`."""
        now = time.monotonic()
        new, old, seconds = self._read(), self._last, max(now - self._last_at, 1e-3)
        self._last, self._last_at = new, now

        def rate(name: str) -> float:
            return (new[name] - old.get(name, 0)) / seconds

        return f"role=leader, state=serving, service_ready=true, master={{{_master(new, rate)}}}, ha={{{_ha(new)}}}"


def _master(values: Mapping[str, float], rate: Callable[[str], float]) -> str:
    def count(name: str) -> int:
        return int(values[f"master_{name}"])

    single = [_single(label, f"master_{stem}", rate) for label, stem in _SINGLE.items()]
    batch = [_batch(label, f"master_{stem}", rate) for label, stem in _BATCH.items()]
    tasks = [_task(label, f"master_{stem}", rate) for label, stem in _TASKS.items()]
    parts = [
        f"Mem Storage: {_share(count('allocated_bytes'), count('total_capacity_bytes'))}",
        f"NVMe-oF SSD: {_share(count('nof_allocated_bytes'), count('total_nof_capacity_bytes'))}",
        f"SSD Storage: {_share(count('allocated_file_size_bytes'), count('total_file_capacity_bytes'))}",
        f"Keys: {count('key_count')} (soft-pinned: {count('soft_pin_key_count')})",
        f"Clients: {count('active_clients')}",
        f"Requests (Success/Total per sec): {', '.join(single)}",
        "Batch Requests (per sec, Req=Success/PartialSuccess/Total, Item=Success/Total): " + ", ".join(batch + tasks),
        (
            f"Eviction: Success/Attempts={count('successful_evictions_total')}/{count('attempted_evictions_total')}, "
            f"AllocFail={count('put_start_alloc_failures_total')}, "
            f"PartialAlloc={count('put_start_partial_allocations_total')}, "
            f"keys={count('evicted_key_count')}, size={size_text(count('evicted_size_bytes'))}"
        ),
        (
            f"Mem Eviction: Success/Attempts={count('successful_evictions_mem')}/{count('attempted_evictions_mem')}, "
            f"keys={count('evicted_key_count_mem')}, size={size_text(count('evicted_size_bytes_mem'))}"
        ),
        "NoF Eviction: Success/Attempts=0/0, keys=0, size=0 B",
        (
            f"Discard: Released/Total={count('put_start_release_cnt')}/{count('put_start_discard_cnt')}, "
            f"StagingSize={size_text(count('put_start_discarded_staging_size'))}"
        ),
        (
            f"Promotion: in_flight={count('promotion_in_flight')}, admitted={count('promotion_admitted_total')}, "
            f"completed={count('promotion_completed_total')}, failed={count('promotion_failed_total')}, "
            f"cancelled={count('promotion_cancelled_total')}, expired={count('promotion_expired_total')}, "
            f"bytes={size_text(count('promotion_completed_bytes_total'))}, rejected(freq/wm/cap)=0/0/0"
        ),
        (
            f"Snapshots: Success={int(values['mooncake_snapshots_written_total'])}, "
            f"Fail={int(values['mooncake_snapshots_failed_total'])}"
        ),
    ]
    return " | ".join(parts)


def _ha(values: Mapping[str, float]) -> str:
    return (
        f"HA Metrics Summary: last_seq={int(values['ha_oplog_last_sequence_id'])}, "
        f"applied_seq={int(values['ha_oplog_applied_sequence_id'])}, lag={int(values['ha_oplog_standby_lag'])}, "
        f"pending={int(values['ha_oplog_pending_entries'])}, "
        f"mutation_queue={int(values['ha_pending_mutation_queue_size'])}, batch_commits=0, sync_commits=0, "
        f"skipped=0, checksum_fail=0, etcd_fail=0, watch_disconn=0, state={int(values['ha_standby_state'])}"
    )


def _single(label: str, metric: str, rate: Callable[[str], float]) -> str:
    total = rate(f"{metric}_requests_total")
    return f"{label}={total - rate(f'{metric}_failures_total'):.2f}/{total:.2f}"


def _batch(label: str, metric: str, rate: Callable[[str], float]) -> str:
    total, partial = rate(f"{metric}_requests_total"), rate(f"{metric}_partial_successes_total")
    whole = total - partial - rate(f"{metric}_failures_total")
    items = rate(f"{metric}_items_total")
    good = items - rate(f"{metric}_failed_items_total")
    return f"{label}:(Req={whole:.2f}/{partial:.2f}/{total:.2f}, Item={good:.2f}/{items:.2f})"


def _task(label: str, metric: str, rate: Callable[[str], float]) -> str:
    total = rate(f"{metric}_requests_total")
    return f"{label}:(Req={total - rate(f'{metric}_failures_total'):.2f}/{total:.2f})"


def _share(used: int, capacity: int) -> str:
    percent = f" ({100 * used / capacity:.1f}%)" if capacity else ""
    return f"{size_text(used)} / {size_text(capacity)}{percent}"


def size_text(size: float) -> str:
    """Bytes for a reader: 0 B, 16.00 MB."""
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{int(size)} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError
