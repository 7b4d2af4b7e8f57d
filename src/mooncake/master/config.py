"""What a master can be told.  `cli.master` fills it from flags and files; defaults are the documented ones."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

STRATEGIES = ("random", "free_ratio_first", "local_first", "ssd_free_ratio_first")


class MasterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the directory and its service.  Times carry their unit in the name."""

    rpc_address: str = "0.0.0.0"
    rpc_port: int = 50051
    """0: any free port (see `MasterService.port`)."""
    lease_ms: int = 10_000
    soft_pin_ttl_ms: int = 1_800_000
    max_soft_pin_ttl_ms: int = 86_400_000
    allow_evict_soft_pinned: bool = True
    eviction_ratio: float = 0.05
    high_watermark: float = 0.90
    client_ttl_s: float = 10.0
    put_start_discard_timeout_s: float = 30.0
    put_start_release_timeout_s: float = 600.0
    allocation_strategy: str = "random"
    max_finished_tasks: int = 10_000
    max_pending_tasks: int = 10_000
    max_processing_tasks: int = 10_000
    pending_task_timeout_s: float = 300.0
    """0: never; so too processing_task_timeout_s."""
    processing_task_timeout_s: float = 300.0
    max_task_retries: int = 10
    enable_offload: bool = False
    offload_on_evict: bool = False
    """Write values to disk only when they leave memory, not when they are put."""
    offload_force_evict: bool = False
    """Values leave memory unwritten, when too many wait to be written."""
    offloading_queue_limit: int = 50_000
    """Values that may wait for one tier."""
    offload_cap_ratio: float = 0.5
    """Share of that for those whose memory is wanted."""
    enable_disk_eviction: bool = True
    disk_quota: int = 0
    """Bytes a tier may use; 0: as its server sees fit."""
    promotion_on_hit: bool = False
    promotion_admission_threshold: int = 2
    promotion_queue_limit: int = 50_000
    promotion_max_per_heartbeat: int = 1
    """Promotions that one server is given at a time."""
    kv_events_endpoint: str = ""
    """Where KV events are published; "": nowhere, and none are made."""
    kv_events_replay_endpoint: str = ""
    kv_events_backend_id: str = ""
    kv_events_queue_capacity: int = 65_536
    """Events that may wait to be published."""
    kv_events_legacy: bool = True
    """Events have the fields `type` and `block_hashes`."""
    kv_events_with_keys: bool = True
    """Events have the field `object_key`."""
    put_wait_s: float = 0.7
    """How long a put may wait for room (a client gives up on an answer after 1 s)."""
    client_gone_s: float = 1.0
    """Open puts of a client are revoked this long after its last connection ended."""
    closed_ttl_s: float = 2.0
    """A segment whose connection was closed is expired after this, or client_ttl_s if that is less."""
    break_lease_after_s: float = 2.0
    """A put without any other room may break probe leases older than this."""
    recovery_window_s: float = 600.0
    """How long a segment that is away is remembered, with the tombstones that it has to learn of."""
    disk_recovery_window_s: float = 86_400.0
    """The same where values are on disk too: a machine with disks may be away for longer."""
    tenant_quotas: Mapping[str, int] | None = None
    """Bytes by tenant; None: without tenants, in one name space."""
    tenant_credentials_file: str = ""
    """Who may be which tenant; "": whoever says so."""
    assembly_s: float = 60.0
    """How long the parts of a spanning value wait for the segment with the missing ones."""
