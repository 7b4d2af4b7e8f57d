"""The drop-in surface of the store: `from mooncake.store import MooncakeDistributedStore, ReplicateConfig`."""

from mooncake.installed_once import refuse_if_cpp_installed

refuse_if_cpp_installed()

from mooncake.store.buffers import BufferHandle  # noqa: E402
from mooncake.store.numa import bind_to_numa_node  # noqa: E402
from mooncake.store.store import MooncakeDistributedStore  # noqa: E402
from mooncake.store.types import (  # noqa: E402
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    ObjectDataType,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    TaskStatus,
    TaskType,
)

# The C++ module also puts enum members on itself; where two enums share a name, the later one wins there.
for _enum in (ReplicaStatus, TaskType, TaskStatus, ObjectDataType):
    globals().update(_enum.__members__)

__all__ = [
    "BufferHandle",
    "Descriptor",
    "DiskDescriptor",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "bind_to_numa_node",
]
