"""The names of the C++ module, against what was seen of it."""

import mooncake.store
from mooncake.store import BufferPool, MooncakeDistributedNoFRegister, MooncakeDistributedStore

METHODS = {
    "alloc_from_mem_pool",
    "allocate_and_mount_segment",
    "batch_get_buffer",
    "batch_get_into",
    "batch_get_into_multi_buffer_ranges",
    "batch_get_into_multi_buffers",
    "batch_get_replica_desc",
    "batch_get_session_end",
    "batch_get_session_start",
    "batch_get_tensor",
    "batch_get_tensor_into",
    "batch_get_tensor_into_cuda",
    "batch_get_tensor_with_parallelism",
    "batch_get_tensor_with_parallelism_into",
    "batch_get_tensor_with_tp",
    "batch_get_tensor_with_tp_into",
    "batch_is_exist",
    "batch_pub_tensor",
    "batch_pub_tensor_with_tp",
    "batch_put_from",
    "batch_put_from_multi_buffer_ranges",
    "batch_put_from_multi_buffers",
    "batch_put_session_end",
    "batch_put_session_revoke",
    "batch_put_session_start",
    "batch_put_tensor",
    "batch_put_tensor_from",
    "batch_put_tensor_with_parallelism",
    "batch_put_tensor_with_parallelism_from",
    "batch_put_tensor_with_tp",
    "batch_put_tensor_with_tp_from",
    "batch_remove",
    "batch_replica_clear",
    "batch_upsert_from",
    "batch_upsert_pub_tensor",
    "batch_upsert_tensor",
    "batch_upsert_tensor_from",
    "batch_upsert_tensor_with_parallelism",
    "batch_upsert_tensor_with_parallelism_from",
    "close",
    "create_copy_task",
    "create_move_task",
    "get",
    "get_batch",
    "get_buffer",
    "get_hostname",
    "get_into",
    "get_into_ranges",
    "get_offload_rpc_read_count",
    "get_replica_desc",
    "get_size",
    "get_tensor",
    "get_tensor_into",
    "get_tensor_into_cuda",
    "get_tensor_with_parallelism",
    "get_tensor_with_parallelism_into",
    "get_tensor_with_tp",
    "get_tensor_with_tp_into",
    "health_check",
    "init_all",
    "is_exist",
    "load_tensor_from_safetensor",
    "mount_segment",
    "pub_tensor",
    "pub_tensor_with_tp",
    "put",
    "put_batch",
    "put_from",
    "put_from_with_metadata",
    "put_parts",
    "put_tensor",
    "put_tensor_from",
    "put_tensor_with_parallelism",
    "put_tensor_with_parallelism_from",
    "put_tensor_with_tp",
    "put_tensor_with_tp_from",
    "query_task",
    "register_buffer",
    "remove",
    "remove_all",
    "remove_by_regex",
    "save_tensor_to_safetensor",
    "setup",
    "setup_dummy",
    "unmount_and_free_segment",
    "unmount_local_disk_segment",
    "unmount_segment",
    "unregister_buffer",
    "upsert",
    "upsert_batch",
    "upsert_from",
    "upsert_parts",
    "upsert_pub_tensor",
    "upsert_tensor",
    "upsert_tensor_from",
    "upsert_tensor_with_parallelism",
    "upsert_tensor_with_parallelism_from",
}
MODULE = {
    "ACTIVATION",
    "BufferHandle",
    "BufferLease",
    "BufferLeaseView",
    "BufferPool",
    "COMPLETE",
    "Descriptor",
    "DiskDescriptor",
    "EngramStore",
    "EngramStoreConfig",
    "FAILED",
    "GENERAL",
    "GRADIENT",
    "INITIALIZED",
    "KVCACHE",
    "METADATA",
    "MemoryDescriptor",
    "MooncakeDistributedNoFRegister",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "OPTIMIZER_STATE",
    "ObjectDataType",
    "PENDING",
    "PROCESSING",
    "ParallelAxis",
    "QueryTaskResponse",
    "REMOVED",
    "REPLICA_COPY",
    "REPLICA_MOVE",
    "ReadTarget",
    "RegisteredBufferLease",
    "RegisteredBufferLeaseView",
    "RegisteredBufferPool",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SAMPLE",
    "SUCCESS",
    "SoftPinAction",
    "TENSOR",
    "TaskStatus",
    "TaskType",
    "TensorParallelism",
    "UNDEFINED",
    "UNKNOWN",
    "WEIGHT",
    "_deserialize_tensor",
    "_get_pyclient_from_wrapper",
    "_serialize_tensor",
    "_tensor_metadata_size",
    "bind_to_numa_node",
    "get_alloc_func_addr",
    "get_free_func_addr",
}


def test_names():
    assert not {name for name in MODULE if not hasattr(mooncake.store, name)}
    assert not {name for name in METHODS if not hasattr(MooncakeDistributedStore, name)}


def test_wrappers_of_a_store(store):
    class Wrapper:
        def _get_pyclient_capsule(self):
            return store

    assert mooncake.store._get_pyclient_from_wrapper(Wrapper()) is store
    assert BufferPool(Wrapper()).acquire(10).size == 10


def test_what_there_is_no_hardware_for():
    registry = MooncakeDistributedNoFRegister()
    assert registry.real_register("host", 1, "name", 1, 0, 1, "master") == -1012
    assert registry.real_unregister_by_endpoint("host", 1, "name", 1, "master") == -1012


def test_init_all(master, monkeypatch):
    store = MooncakeDistributedStore()
    for name in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER"):
        monkeypatch.delenv(name, raising=False)
    assert store.init_all("tcp", "", 16 << 20) == -600
    monkeypatch.setenv("MOONCAKE_MASTER", master.address)
    monkeypatch.setenv("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1")
    assert store.init_all("tcp", "", 16 << 20) == 0
    assert store.put("k", b"v") == 0
    store.close()
