"""The names of all metrics that /metrics shows besides the process's own, with what they mean.

They are those of the drop-in surface, to the letter, plus ours (mooncake_...).  A metric of a capability that
is not here stays at zero.
"""

_REQUESTS = {
    "exist_key": "ExistKey",
    "put_start": "PutStart",
    "put_end": "PutEnd",
    "put_revoke": "PutRevoke",
    "get_replica_list": "GetReplicaList",
    "get_replica_list_by_regex": "GetReplicaListByRegex",
    "remove": "Remove",
    "remove_by_regex": "RemoveByRegex",
    "remove_all": "RemoveAll",
    "mount_segment": "MountSegment",
    "unmount_segment": "UnmountSegment",
    "remount_segment": "RemountSegment",
    "ping": "Ping",
    "copy_start": "CopyStart",
    "copy_end": "CopyEnd",
    "copy_revoke": "CopyRevoke",
    "move_start": "MoveStart",
    "move_end": "MoveEnd",
    "move_revoke": "MoveRevoke",
    "evict_disk_replica": "EvictDiskReplica",
    "create_copy_task": "CreateCopyTask",
    "create_move_task": "CreateMoveTask",
    "query_task": "QueryTask",
    "fetch_tasks": "FetchTasks",
    "update_task": "MarkTaskToComplete",
}
_BATCH_REQUESTS = {
    "batch_exist_key": "BatchExistKey",
    "batch_get_replica_list": "BatchGetReplicaList",
    "batch_put_start": "BatchPutStart",
    "batch_put_end": "BatchPutEnd",
    "batch_put_revoke": "BatchPutRevoke",
    "batch_remove": "BatchRemove",
    "batch_query_ip": "BatchQueryIp",
    "batch_replica_clear": "BatchReplicaClear",
}
_PROMOTIONS = {
    "admitted_total": "promotions started",
    "completed_total": "promotions completed",
    "completed_bytes_total": "bytes promoted",
    "failed_total": "promotions failed",
    "cancelled_total": "promotions cancelled",
    "expired_total": "promotions expired",
    "rejected_frequency_total": "promotions refused: read too seldom",
    "rejected_watermark_total": "promotions refused: memory too full",
    "rejected_cap_total": "promotions refused: too many in flight",
    "candidate_recorded_total": "candidates noted",
    "candidate_admitted_total": "candidates promoted later",
    "candidate_admission_rejected_total": "candidates refused again",
    "candidate_expired_evaluated_total": "candidates given up after a try",
    "candidate_expired_unevaluated_total": "candidates given up untried",
    "candidate_dropped_limit_total": "candidates not noted: too many",
}


def _request_counters() -> dict[str, str]:
    counters = {}
    for stem, label in (_REQUESTS | _BATCH_REQUESTS).items():
        counters[f"master_{stem}_requests_total"] = f"{label} requests"
        counters[f"master_{stem}_failures_total"] = f"{label} requests that failed"
    for stem, label in _BATCH_REQUESTS.items():
        counters[f"master_{stem}_partial_successes_total"] = f"{label} requests of which some items failed"
        counters[f"master_{stem}_items_total"] = f"Items of {label} requests"
        counters[f"master_{stem}_failed_items_total"] = f"Items of {label} requests that failed"
    return counters


COUNTERS: dict[str, str] = {
    **_request_counters(),
    "master_put_start_alloc_failures_total": "Puts refused for want of room",
    "master_put_start_partial_allocations_total": "Puts granted fewer replicas than wanted",
    "master_put_start_discard_cnt": "Unfinished puts given up",
    "master_put_start_release_cnt": "Unfinished puts whose room was given back",
    "total_get_nums_": "Keys asked for by gets",
    "valid_get_nums_": "Keys found by gets",
    "mem_cache_hit_nums_": "Keys found in memory by gets",
    "mem_cache_hit_bytes_total": "Bytes of keys found in memory by gets",
    "file_cache_hit_nums_": "Keys found on disk by gets",
    "file_cache_hit_bytes_total": "Bytes of keys found on disk by gets",
    "master_attempted_evictions_total": "Evictions tried",
    "master_attempted_evictions_mem": "Evictions from memory tried",
    "master_successful_evictions_total": "Evictions that freed something",
    "master_successful_evictions_mem": "Evictions from memory that freed something",
    "master_evicted_key_count": "Objects evicted",
    "master_evicted_key_count_mem": "Objects evicted from memory",
    "master_evicted_size_bytes": "Bytes evicted",
    "master_evicted_size_bytes_mem": "Bytes evicted from memory",
    "mooncake_drain_moved_total": "Drain jobs: values moved to other segments",
    "mooncake_drain_moved_bytes_total": "Drain jobs: bytes of those",
    "mooncake_drain_failed_total": "Drain jobs: values that could not leave their segment",
    "mooncake_checksum_mismatches_total": "Replicas dropped since a reader found other bytes than their checksum says",
    "mooncake_offload_failed_total": "Disk tier: values that could not be written",
    "mooncake_offload_refused_total": "Disk tier: evictions from memory put off because too many values waited",
    "mooncake_offload_forced_total": "Disk tier: values evicted unwritten because too many waited",
    "mooncake_disk_evicted_total": "Disk tier: values that left the disk, to make room or because they were damaged",
    "mooncake_kv_events_published_total": "KV events: published",
    "mooncake_kv_events_batches_total": "KV events: messages that held them",
    "mooncake_kv_events_retold_total": "KV events: times that all values were told anew",
    "mooncake_kv_events_dropped_total": "KV events: lost because too many waited",
    "mooncake_kv_events_unparsed_keys_total": "KV events: published without a hash, since the key is none",
    "mooncake_snapshots_written_total": "Snapshots written",
    "mooncake_snapshots_failed_total": "Snapshots that could not be written, or only to the backup folder",
    "mooncake_snapshots_damaged_total": "Snapshots that were found damaged at the start",
    "mooncake_snapshot_restores_total": "1 if the master began with a snapshot",
    "mooncake_snapshot_restore_failures_total": "Snapshot stores that could not be read at the start",
    **{f"master_promotion_{name}": f"Disk tier: {text}" for name, text in _PROMOTIONS.items()},
}
GAUGES: dict[str, str] = {
    "master_allocated_bytes": "Bytes allocated in all segments",
    "master_total_capacity_bytes": "Bytes of all segments",
    "master_nof_allocated_bytes": "Bytes allocated on NVMe-oF",
    "master_total_nof_capacity_bytes": "Bytes of all NVMe-oF segments",
    "master_allocated_file_size_bytes": "Bytes allocated in file storage",
    "master_total_file_capacity_bytes": "Bytes of file storage",
    "master_key_count": "Objects",
    "master_soft_pin_key_count": "Soft-pinned objects",
    "master_active_clients": "Clients with mounted segments or open connections",
    "master_put_start_discarded_staging_size": "Bytes of unfinished puts that were given up and not given back yet",
    "master_promotion_in_flight": "Disk tier: promotions in flight",
    "mem_cache_nums_": "Objects in memory",
    "file_cache_nums_": "Objects on disk",
    "ha_oplog_last_sequence_id": "High availability: last entry written",
    "ha_oplog_applied_sequence_id": "High availability: last entry applied",
    "ha_oplog_standby_lag": "High availability: entries behind",
    "ha_oplog_pending_entries": "High availability: entries out of order",
    "ha_pending_mutation_queue_size": "High availability: entries to write again",
    "ha_standby_state": "High availability: state of the standby",
}
SEGMENT_GAUGES: dict[str, str] = {
    "segment_allocated_bytes": "Bytes allocated in the segment",
    "segment_total_capacity_bytes": "Bytes of the segment",
}
VALUE_SIZES = "master_value_size_bytes"
VALUE_SIZE_BOUNDS = (4096, 65_536, 262_144, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
OWN_GAUGES: dict[str, str] = {
    "mooncake_quarantined_bytes": "Bytes of removed values that may not be given out again yet",
    "mooncake_read_leases": "Read leases of gets under way",
    "mooncake_open_puts": "Puts that were granted room and have not ended",
    "mooncake_waiting_puts": "Puts that wait for room",
    "mooncake_snapshot_time_seconds": "When the last snapshot was written, in seconds since the epoch; 0: not yet",
    "mooncake_snapshot_bytes": "Size of the last snapshot",
    "mooncake_snapshot_duration_ms": "How long it took to write it",
    "mooncake_drain_jobs": "Drain jobs that have not ended",
    "mooncake_disk_tiers": "Disk tier: segment servers with a disk that takes values",
    "mooncake_offload_queue": "Disk tier: values that wait to be written",
    "mooncake_disk_written_bytes": "Disk tier: bytes of values written since the servers' start",
    "mooncake_disk_read_bytes": "Disk tier: bytes of values read since the servers' start",
    "mooncake_disk_reads": "Disk tier: values read since the servers' start",
    "mooncake_disk_writes": "Disk tier: values written since the servers' start",
    "mooncake_disk_corrupt": "Disk tier: values that were damaged, and dropped, since the servers' start",
    "mooncake_disk_compacted": "Disk tier: values moved out of files that were mostly dead since the servers' start",
    "mooncake_disk_compacted_bytes": "Disk tier: bytes of these",
    "mooncake_disk_torn": "Disk tier: damaged places found in index files at the servers' start",
}

TENANT_GAUGES: dict[str, str] = {
    "mooncake_tenant_used_bytes": "Memory that a tenant's values and puts in progress take",
    "mooncake_tenant_quota_bytes": "Memory that a tenant's policy asks for",
    "mooncake_tenant_limit_bytes": "Memory that a tenant may have: its quota, or its part of the pool if that is less",
    "mooncake_tenant_keys": "Keys of a tenant",
    "mooncake_tenant_evicted_keys": "Values of a tenant evicted from memory since the master's start",
    "mooncake_tenant_refused_keys": "Keys of a tenant that were refused for its quota since the master's start",
}
"""With the label `tenant`; only of a master with tenants."""
