# ruff: noqa: E501 -- one row a flag
"""The table of the master's flags: name, type, default, meaning, and what this version lacks.

One row per flag; the command line, the config file, `--help` and docs/configuration.md are all made from it.
Names, types and defaults are those of the drop-in surface.
"""

import enum
import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from mooncake.config_text import shown

Value = bool | int | float | str


class Kind(enum.Enum):
    """A flag's type, as `--help` names it; whole numbers carry their range."""

    BOOL = "bool"
    INT32 = "int32"
    INT64 = "int64"
    UINT32 = "uint32"
    UINT64 = "uint64"
    DOUBLE = "double"
    STRING = "string"
    DURATION = "duration"  # milliseconds, or text such as 500ms, 10s, 5m, 1h


WHOLE_RANGES: dict[Kind, tuple[int, int]] = {
    Kind.INT32: (-(1 << 31), (1 << 31) - 1),
    Kind.INT64: (-(1 << 63), (1 << 63) - 1),
    Kind.UINT32: (0, (1 << 32) - 1),
    Kind.UINT64: (0, (1 << 64) - 1),
}


class Capability(NamedTuple):
    """Something this version cannot do.  `switch` is the flag that turns it on, "" if it has none."""

    name: str
    switch: str = ""


OPLOG = Capability("the replicated operation log", "enable_oplog")
FILE_TIER = Capability("a shared file system as storage tier")
NVME_OF = Capability("NVMe-over-fabrics segments")
CXL = Capability("CXL memory", "enable_cxl")
CACHELIB = Capability("the cachelib allocator")
DYNAMIC_REPLICATION = Capability("dynamic replication", "dynamic_replication_mode")


class Flag(NamedTuple):
    """One row.  `lacks`: any value but the default is refused, for want of this capability; `lacks_choice`: some
    of the choices are.  `inert`: why a value is accepted though it changes nothing here.  `switches`: flags without
    any of which it has no effect."""

    name: str
    kind: Kind
    default: Value
    text: str
    lacks: Capability | None = None
    inert: str = ""
    choices: tuple[str, ...] = ()
    lacks_choice: Mapping[str, Capability] = MappingProxyType({})
    least: float | None = None
    most: float | None = None
    file_name: str = ""  # in the config file, where that differs
    in_file: bool = True
    switches: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        """Its name in the config file."""
        return self.file_name or self.name

    @property
    def default_text(self) -> str:
        """The default as one would write it."""
        if isinstance(self.default, bool):
            return "true" if self.default else "false"
        return f'"{self.default}"' if self.kind in (Kind.STRING, Kind.DURATION) else str(self.default)

    @property
    def wanted(self) -> str:
        """What its values are, for "expected ..."."""
        if self.kind is Kind.BOOL:
            return "true or false"
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is Kind.STRING:
            return "text"
        noun = {Kind.DOUBLE: "a number", Kind.DURATION: "milliseconds (or text such as 10s)"}.get(
            self.kind, "a whole number"
        )
        least, most = self._range
        if most is None:
            return noun if least is None else f"{noun} of at least {least}"
        return f"{noun} from {least} to {most}"

    @property
    def _range(self) -> tuple[float | None, float | None]:
        least, most = WHOLE_RANGES.get(self.kind, (None, None))
        return least if self.least is None else self.least, most if self.most is None else self.most

    def check(self, value: Value) -> Value:
        """`value`, which has the right type; ValueError "expected ..." if it is out of range."""
        if self.choices and value not in self.choices:
            raise ValueError(f"expected {self.wanted}, but found {shown(value)}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            least, most = self._range
            if not math.isfinite(value) or (least is not None and value < least) or (most is not None and value > most):
                raise ValueError(f"expected {self.wanted}, but found {shown(value)}")
        return value


def _port(name: str, default: int, text: str, lacks: Capability | None = None) -> Flag:
    return Flag(name, Kind.INT32, default, text, lacks, least=0, most=65535)


def _ratio(name: str, default: float, text: str, lacks: Capability | None = None) -> Flag:
    return Flag(name, Kind.DOUBLE, default, text, lacks, least=0.0, most=1.0)


def _snapshot(name: str, kind: Kind, default: Value, text: str, least: float | None = None) -> Flag:
    return Flag(name, kind, default, text, least=least, switches=("enable_snapshot", "enable_snapshot_restore"))


def _elected(name: str, default: str, text: str, inert: str = "", choices: tuple[str, ...] = ()) -> Flag:
    return Flag(name, Kind.STRING, default, text, inert=inert, choices=choices, switches=("enable_ha",))


BOOL, INT32, INT64, UINT32, UINT64 = Kind.BOOL, Kind.INT32, Kind.INT64, Kind.UINT32, Kind.UINT64
DOUBLE, STRING, DURATION = Kind.DOUBLE, Kind.STRING, Kind.DURATION

_ONE_LOOP = "the master is one event loop; the figure is only logged"
_NOT_IN_EVENTS = "it is no part of KV events"

# fmt: off
FLAGS: tuple[Flag, ...] = (
    # RPC service
    Flag("config_path", STRING, "", "Configuration file, JSON or YAML (.yaml, .yml); flags given on the command line win", in_file=False),
    _port("port", 50051, "Port of the master service (deprecated, use rpc_port)"),
    _port("rpc_port", 0, "Port of the master service (0: use port)"),
    Flag("rpc_address", STRING, "0.0.0.0", "Address the master service listens on"),
    Flag("rpc_interface", STRING, "", "Network interface whose IPv4 address the master service listens on, instead of rpc_address"),
    Flag("max_threads", INT32, 16, "Number of RPC threads (deprecated, use rpc_thread_num)", inert=_ONE_LOOP, least=0),
    Flag("rpc_thread_num", INT32, 0, "Number of RPC threads (0: max_threads, at most the number of cores)", inert=_ONE_LOOP, least=0),
    Flag("rpc_conn_timeout_seconds", INT32, 0, "Close RPC connections that were silent for so many seconds (0: never)",
         inert="connections are kept until their client goes", least=0),
    Flag("rpc_enable_tcp_no_delay", BOOL, True, "Set TCP_NODELAY on RPC connections", inert="it is always set"),
    # Metrics and administration
    Flag("enable_metric_reporting", BOOL, True, "Log a line of metrics every 10 seconds"),
    _port("metrics_port", 9003, "Port of the HTTP metrics and administration server"),
    Flag("metrics_host", STRING, "0.0.0.0", 'Address the HTTP metrics and administration server listens on ("::" for IPv6 and IPv4)'),
    # Leases, pins, membership
    Flag("default_kv_lease_ttl", DURATION, 10_000, "Read lease of an object: milliseconds, or a number with ms, s, m or h", least=1),
    Flag("default_kv_soft_pin_ttl", DURATION, 1_800_000, "Soft pin of an object, likewise"),
    Flag("max_kv_soft_pin_ttl", DURATION, 86_400_000, "Longest soft pin that a put may ask for, likewise"),
    Flag("client_ttl", INT64, 10, "Seconds without a sign of life after which a client's segments are unmounted", least=1,
         file_name="client_live_ttl_sec"),
    Flag("put_start_discard_timeout_sec", UINT64, 30, "Seconds after which an unfinished put may be replaced by another of the same key"),
    Flag("put_start_release_timeout_sec", UINT64, 600, "Seconds after which an unfinished put gives its room back at the latest"),
    # Placement and eviction
    Flag("allocation_strategy", STRING, "random", "How a segment is chosen for a replica",
         choices=("random", "free_ratio_first", "local_first", "ssd_free_ratio_first", "cxl"),
         lacks_choice={"cxl": CXL}),
    Flag("memory_allocator", STRING, "offset", "Allocator of segment memory", choices=("offset", "cachelib"),
         lacks_choice={"cachelib": CACHELIB}),
    Flag("allow_evict_soft_pinned_objects", BOOL, True, "Evict soft-pinned objects when nothing else can be evicted"),
    _ratio("eviction_ratio", 0.05, "Share of the pool that one eviction frees at least"),
    _ratio("eviction_high_watermark_ratio", 0.9, "Share of the pool in use above which eviction starts ahead of demand (1: only on demand)"),
    Flag("cluster_id", STRING, "mooncake_cluster", "Name of this cluster: its leader is elected under it, its snapshots lie under it, and the tenants' quotas in etcd"),
    # Tasks
    Flag("max_total_finished_tasks", UINT32, 10_000, "Finished tasks to remember"),
    Flag("max_total_pending_tasks", UINT32, 10_000, "Tasks that may wait"),
    Flag("max_total_processing_tasks", UINT32, 10_000, "Tasks that may run"),
    Flag("pending_task_timeout_sec", UINT64, 300, "Seconds a task may wait (0: for ever)"),
    Flag("processing_task_timeout_sec", UINT64, 300, "Seconds a task may run (0: for ever)"),
    Flag("max_retry_attempts", UINT32, 10, "Attempts at a failed task"),
    # SSD and file tiers
    Flag("enable_offload", BOOL, False, "Keep objects on SSDs too"),
    Flag("offload_on_evict", BOOL, False, "Write an object to SSD when it is evicted, not when it is put"),
    Flag("offload_force_evict", BOOL, False, "Evict objects that exceed the offload cap unwritten"),
    Flag("offloading_queue_limit", UINT64, 50_000, "Objects that may wait for one SSD"),
    _ratio("offload_cap_ratio", 0.5, "Share of offloading_queue_limit that one eviction may queue"),
    Flag("promotion_on_hit", BOOL, False, "Bring an object on SSD back to memory when it is read"),
    Flag("promotion_admission_threshold", UINT32, 2, "Reads before an object is promoted"),
    Flag("promotion_queue_limit", UINT32, 50_000, "Promotions in flight"),
    Flag("promotion_max_per_heartbeat", UINT32, 1, "Promotions one client is given at a time"),
    Flag("enable_disk_eviction", BOOL, True, "Evict from disks that are full"),
    Flag("quota_bytes", UINT64, 0, "Bytes of disk to use (0: 90 % of the disk)"),
    Flag("root_fs_dir", STRING, "", "Directory of a shared file system that keeps a copy of every object", FILE_TIER),
    Flag("global_file_segment_size", INT64, (1 << 63) - 1, "Bytes of the shared file system to use", FILE_TIER),
    Flag("nof_eviction_ratio", DOUBLE, 0.05, "As eviction_ratio, of NVMe-oF segments", NVME_OF),
    Flag("nof_eviction_high_watermark_ratio", DOUBLE, 0.9, "As eviction_high_watermark_ratio, of NVMe-oF segments", NVME_OF),
    Flag("nof_heartbeat_interval_sec", INT64, 10, "Seconds between probes of an NVMe-oF segment", NVME_OF),
    Flag("nof_heartbeat_probe_timeout_ms", UINT32, 1000, "Milliseconds a probe of an NVMe-oF segment may take", NVME_OF),
    Flag("nof_heartbeat_failures_threshold", UINT32, 3, "Failed probes before an NVMe-oF segment is unmounted", NVME_OF),
    Flag("enable_cxl", BOOL, False, "Use CXL memory", CXL),
    Flag("cxl_path", STRING, "/dev/dax0.0", "Device of the CXL memory", CXL),
    Flag("cxl_size", UINT64, 8 << 30, "Bytes of CXL memory", CXL),
    # High availability
    Flag("enable_ha", BOOL, False, "Run as one of several masters, which elect their leader"),
    _elected("ha_backend_type", "etcd", "Where masters elect their leader", choices=("etcd", "redis", "k8s")),
    _elected("ha_backend_connstring", "", "How to reach that back end: HOST:PORT[;HOST:PORT] of etcd, redis://HOST:PORT, or NAMESPACE/LEASE"),
    _elected("etcd_endpoints", "", "Addresses of etcd, separated by semicolons, where ha_backend_connstring is empty"),
    _elected("pod_name", os.environ.get("POD_NAME", ""), "Pod name for Kubernetes (default: $POD_NAME)", inert="a lease names its holder by address"),
    _elected("pod_namespace", os.environ.get("POD_NAMESPACE", ""), "Namespace of the lease, if ha_backend_connstring names none (default: $POD_NAMESPACE, then the pod's own)"),
    Flag("enable_oplog", BOOL, False, "Replicate the directory's changes to the other masters", OPLOG),
    Flag("oplog_poll_interval_ms", INT32, 1000, "Milliseconds between a standby's polls", OPLOG),
    Flag("oplog_batch_max_entries", UINT32, 1024, "Entries of one batch of the log", OPLOG),
    Flag("batch_oplog_retry_timeout_sec", UINT32, 180, "Seconds a standby retries", OPLOG),
    Flag("enable_snapshot", BOOL, False, "Write what the segments' own tables do not hold to storage at intervals"),
    Flag("enable_snapshot_restore", BOOL, False, "Begin with the newest whole snapshot"),
    _snapshot("snapshot_interval_seconds", UINT64, 600, "Seconds between snapshots", least=1),
    _snapshot("snapshot_child_timeout_seconds", UINT64, 300, "Seconds that writing one may take", least=1),
    _snapshot("snapshot_retention_count", UINT32, 2, "Snapshots to keep", least=1),
    _snapshot("snapshot_backup_dir", STRING, "", "Local directory for snapshots that could not be written where they should be"),
    _snapshot("snapshot_object_store_type", STRING, "", "Where snapshots lie: local ($MOONCAKE_SNAPSHOT_LOCAL_PATH) or s3 ($MOONCAKE_AWS_...)"),
    _snapshot("snapshot_payload_store_type", STRING, "", "Deprecated name of snapshot_object_store_type"),
    _snapshot("snapshot_payload_backend_type", STRING, "", "Deprecated name of snapshot_object_store_type"),
    _snapshot("snapshot_catalog_store_type", STRING, "", "Where the list of snapshots lies: embedded (beside them, also if empty) or redis"),
    _snapshot("snapshot_catalog_backend_type", STRING, "", "Deprecated name of snapshot_catalog_store_type"),
    _snapshot("snapshot_catalog_store_connstring", STRING, "", "How to reach that list: redis://HOST:PORT"),
    _snapshot("snapshot_catalog_backend_connstring", STRING, "", "Deprecated name of snapshot_catalog_store_connstring"),
    # Tenants, replication, events, metadata
    Flag("tls_cert_file", STRING, "", "This process's certificate, in PEM form, as MOONCAKE_TLS_CERT"),
    Flag("tls_key_file", STRING, "", "Its key, as MOONCAKE_TLS_KEY"),
    Flag("tls_ca_file", STRING, "", "The certificate of the cluster's authority, as MOONCAKE_TLS_CA"),
    Flag("enable_multi_tenants", BOOL, False, "Give each tenant keys and a quota of its own"),
    Flag("tenant_credentials_file", STRING, "", "The file that says how tenants prove who they are (empty: nobody does)", switches=("enable_multi_tenants",)),
    Flag("tenant_quota_connector_type", STRING, "file", "Where the tenants' quotas are kept", choices=("file", "etcd")),
    Flag("tenant_quota_connector_uri", STRING, "", "The YAML file with them (empty: only in memory), or HOST:PORT of etcd"),
    Flag("dynamic_replication_mode", STRING, "off", "Copy objects that are read often: off, observe or enforce", DYNAMIC_REPLICATION),
    Flag("dynamic_replication_heat_window_seconds", UINT32, 10, "Seconds over which reads are counted", DYNAMIC_REPLICATION),
    Flag("dynamic_replication_admission_qps_threshold", DOUBLE, 0.8, "Reads a second that make another copy", DYNAMIC_REPLICATION),
    Flag("dynamic_replication_max_memory_replicas", UINT64, 2, "Copies an object may get", DYNAMIC_REPLICATION),
    Flag("enable_kv_events", BOOL, False, "Publish what is stored and removed over ZeroMQ (needs kv_events_bind_endpoint and kv_events_backend_id)"),
    Flag("kv_events_bind_endpoint", STRING, "", "Address of the publisher, such as tcp://0.0.0.0:5557", switches=("enable_kv_events",)),
    Flag("kv_events_replay_endpoint", STRING, "", "Address at which missed events are asked for, such as tcp://0.0.0.0:5558", switches=("enable_kv_events",)),
    Flag("kv_events_backend_id", STRING, "", "Name of this pool in the events", switches=("enable_kv_events",)),
    Flag("kv_events_queue_capacity", UINT32, 65_536, "Events that may wait; further ones push out the oldest", least=1, switches=("enable_kv_events",)),
    Flag("kv_events_emit_legacy_compat", BOOL, True, "Give events the fields type and block_hashes too", switches=("enable_kv_events",)),
    Flag("kv_events_emit_object_key", BOOL, True, "Give events the object's key too", switches=("enable_kv_events",)),
    Flag("kv_events_model_name", STRING, "", "Deprecated", inert=_NOT_IN_EVENTS, switches=("enable_kv_events",)),
    Flag("kv_events_tenant_id", STRING, "default", "Deprecated", inert=_NOT_IN_EVENTS, switches=("enable_kv_events",)),
    Flag("kv_events_additional_salt", STRING, "", "Deprecated", inert=_NOT_IN_EVENTS, switches=("enable_kv_events",)),
    Flag("kv_events_lora_name", STRING, "", "Deprecated", inert=_NOT_IN_EVENTS, switches=("enable_kv_events",)),
    Flag("kv_events_block_size", UINT32, 0, "Deprecated", inert=_NOT_IN_EVENTS, switches=("enable_kv_events",)),
    Flag("kv_events_dp_rank", UINT32, 0, "Deprecated", inert=_NOT_IN_EVENTS, switches=("enable_kv_events",)),
    Flag("enable_http_metadata_server", BOOL, False, "Serve the transfer engines' metadata over HTTP too"),
    _port("http_metadata_server_port", 8080, "Port of the metadata server"),
    Flag("http_metadata_server_host", STRING, "0.0.0.0", 'Address the metadata server listens on ("::" for IPv6 and IPv4)'),
    Flag("enable_metadata_cleanup_on_timeout", BOOL, False, "Remove the metadata of a segment whose client is lost"),
    # Logging (glog's names)
    Flag("log_dir", STRING, "", "Directory of a journal file mooncake_master.*, instead of stderr"),
    Flag("logtostderr", BOOL, False, "Log to stderr only, whatever log_dir says"),
    Flag("alsologtostderr", BOOL, False, "Log to stderr as well when log_dir is set"),
    Flag("stderrthreshold", INT32, 2, "Log lines of this level and above go to stderr too when log_dir is set", least=0, most=3),
    Flag("minloglevel", INT32, 0, "Leave out log lines below this level (0 info, 1 warning, 2 error, 3 fatal)", least=0, most=3),
    Flag("v", INT32, 0, "Verbosity: 1 and above add debugging lines"),
)
# fmt: on
BY_NAME: dict[str, Flag] = {flag.name: flag for flag in FLAGS}
