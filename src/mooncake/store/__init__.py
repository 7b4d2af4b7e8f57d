"""The drop-in surface of the store: `from mooncake.store import MooncakeDistributedStore, ReplicateConfig`."""

from mooncake.installed_once import refuse_if_cpp_installed

refuse_if_cpp_installed()

from typing import TYPE_CHECKING, Any  # noqa: E402

from mooncake.store.buffer_pool import BufferLease, BufferPool, _get_pyclient_from_wrapper  # noqa: E402
from mooncake.store.buffers import BufferHandle  # noqa: E402
from mooncake.store.host_memory import (  # noqa: E402
    MooncakeHostMemAllocator,
    get_alloc_func_addr,
    get_free_func_addr,
)
from mooncake.store.numa import bind_to_numa_node  # noqa: E402
from mooncake.store.nvme import MooncakeDistributedNoFRegister  # noqa: E402
from mooncake.store.replicas import QueryTaskResponse  # noqa: E402
from mooncake.store.store import MooncakeDistributedStore  # noqa: E402
from mooncake.store.tensors.layout import ParallelAxis, ReadTarget, TensorParallelism  # noqa: E402
from mooncake.store.tensors.serialized import (  # noqa: E402
    _deserialize_tensor,
    _serialize_tensor,
    _tensor_metadata_size,
)
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

if TYPE_CHECKING:
    from mooncake.store.engram import EngramStore, EngramStoreConfig

RegisteredBufferPool = BufferPool
RegisteredBufferLease = BufferLease
BufferLeaseView = RegisteredBufferLeaseView = memoryview  # what BufferLease.buffer is

# The C++ module also puts enum members on itself; where two enums share a name, the later one wins there.
for _enum in (ReplicaStatus, TaskType, TaskStatus, ObjectDataType):
    globals().update(_enum.__members__)

__all__ = [
    "BufferHandle",
    "BufferLease",
    "BufferLeaseView",
    "BufferPool",
    "Descriptor",
    "DiskDescriptor",
    "EngramStore",
    "EngramStoreConfig",
    "MemoryDescriptor",
    "MooncakeDistributedNoFRegister",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ParallelAxis",
    "QueryTaskResponse",
    "ReadTarget",
    "RegisteredBufferLease",
    "RegisteredBufferLeaseView",
    "RegisteredBufferPool",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "TensorParallelism",
    "_deserialize_tensor",
    "_get_pyclient_from_wrapper",
    "_serialize_tensor",
    "_tensor_metadata_size",
    "bind_to_numa_node",
    "get_alloc_func_addr",
    "get_free_func_addr",
]


def __getattr__(name: str) -> Any:
    if name in ("EngramStore", "EngramStoreConfig"):  # with numpy, which the others leave to the first setup
        from mooncake.store import engram

        return getattr(engram, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
