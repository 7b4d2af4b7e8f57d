"""The small types of the drop-in surface: enums, ReplicateConfig, replica descriptors (spec: drop-in behaviour 1.1)."""

from enum import Enum
from typing import Any

from mooncake.rpc.messages import PutOptions

_UINT64 = 1 << 64


class _NamedInt(Enum):
    """An enum whose members also convert with int(), as pybind11's do."""

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)


class ReplicaStatus(_NamedInt):
    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskType(_NamedInt):
    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class TaskStatus(_NamedInt):
    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


class ObjectDataType(_NamedInt):
    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class SoftPinAction(_NamedInt):
    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ReplicateConfig:
    """How a value is to be placed and kept.  Unknown attributes are refused, so a typing error cannot pass."""

    group_ids: list[str] | None = None  # on the class: callers probe for it there
    _FIELDS = (
        "replica_num",
        "nof_replica_num",
        "dfs_replica_num",
        "soft_pin_action",
        "soft_pin_ttl_ms",
        "with_hard_pin",
        "preferred_segments",
        "preferred_nof_segments",
        "preferred_segment",
        "prefer_alloc_in_same_node",
        "data_type",
        "group_ids",
    )

    replica_num: int
    nof_replica_num: int
    dfs_replica_num: int
    soft_pin_action: SoftPinAction
    soft_pin_ttl_ms: int | None
    with_hard_pin: bool
    preferred_segments: list[str]
    preferred_nof_segments: list[str]
    preferred_segment: str
    prefer_alloc_in_same_node: bool
    data_type: ObjectDataType

    def __init__(self) -> None:
        self.replica_num = 1
        self.nof_replica_num = 0
        self.dfs_replica_num = 0
        self.soft_pin_action = SoftPinAction.PRESERVE
        self.soft_pin_ttl_ms = None
        self.with_hard_pin = False
        self.preferred_segments = []
        self.preferred_nof_segments = []
        self.preferred_segment = ""
        self.prefer_alloc_in_same_node = False
        self.data_type = ObjectDataType.UNKNOWN
        self.group_ids = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._FIELDS:
            raise AttributeError(f"'ReplicateConfig' object has no attribute '{name}'")
        if (
            name == "soft_pin_ttl_ms"
            and value is not None
            and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _UINT64)
        ):
            raise TypeError(f"soft_pin_ttl_ms is {value!r}; expected None or whole milliseconds, 0 to 2^64 - 1")
        object.__setattr__(self, name, value)

    def __str__(self) -> str:
        shown = []
        for name in self._FIELDS:
            value = getattr(self, name)
            text = value.name if isinstance(value, Enum) else str(value)
            if name != "data_type":
                shown.append(f"{name}: {text}")
        return "ReplicateConfig: { " + ", ".join(shown) + f", data_type: {self.data_type.name} }}"

    def options(self, count: int, same_node_allowed: bool) -> PutOptions | None:
        """What the master is told for a put of `count` keys; None if the combination is invalid (-600)."""
        action = int(self.soft_pin_action)
        if (
            self.replica_num < 0
            or self.replica_num + self.nof_replica_num + self.dfs_replica_num <= 0
            or self.nof_replica_num != 0
            or (self.soft_pin_ttl_ms is not None and action != SoftPinAction.ENABLE.value)
            or (self.prefer_alloc_in_same_node and not same_node_allowed)
            or (self.group_ids is not None and len(self.group_ids) != count)
        ):
            return None
        preferred = list(self.preferred_segments)
        if self.preferred_segment:
            preferred = [self.preferred_segment]
        return PutOptions(
            self.replica_num,
            preferred,
            self.prefer_alloc_in_same_node,
            self.with_hard_pin,
            action,
            self.soft_pin_ttl_ms,
            list(self.group_ids or []),
            int(self.data_type),
        )


class Descriptor:
    """Where the first extent of a memory replica lies; `size` is the whole value's."""

    def __init__(self) -> None:
        self.size = 0
        self.buffer_address = 0
        self.transport_endpoint = ""

    def __repr__(self) -> str:
        return (
            f"<Descriptor size={self.size} buffer_address={self.buffer_address} "
            f"transport_endpoint={self.transport_endpoint}>"
        )


class MemoryDescriptor:
    def __init__(self, buffer_descriptor: Descriptor) -> None:
        self.buffer_descriptor = buffer_descriptor


class DiskDescriptor:
    def __init__(self, file_path: str, object_size: int) -> None:
        self.file_path = file_path
        self.object_size = object_size


class ReplicaDescriptor:
    """One replica of a value; `memory` is None for one on the own disk of a segment server."""

    def __init__(self, status: ReplicaStatus, memory: MemoryDescriptor | None) -> None:
        self.status = status
        self._memory = memory

    def is_memory_replica(self) -> bool:
        return self._memory is not None

    def is_disk_replica(self) -> bool:
        return False

    def is_local_disk_replica(self) -> bool:
        return self._memory is None

    def get_memory_descriptor(self) -> MemoryDescriptor:
        if self._memory is None:
            raise RuntimeError("this replica lies on a server's disk, not in memory")
        return self._memory

    def get_disk_descriptor(self) -> DiskDescriptor:
        where = "in memory" if self._memory is not None else "on a server's own disk"
        raise RuntimeError(f"this replica lies {where}, not in a shared file")
