"""SGLang's HiCache back end on a pool: its own MooncakeStore beside its own host KV pools, which lie in CPU memory.

Forked by zygote.py; every function is one process and says what its calls returned.
"""

import os

from tests.clients import stand_ins

stand_ins.install("triton", "sgl_kernel", "torchvision", "IPython")  # GPU; torch for CUDA; notebooks

import runpy  # noqa: E402
import sys  # noqa: E402

import torch  # noqa: E402
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (  # noqa: E402
    init_mooncake_transfer_engine,
)
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import HostKVCache  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_embedding_store import MooncakeEmbeddingStore  # noqa: E402
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

PAGE, LAYERS, HEADS, WIDTH = 16, 3, 4, 32  # tokens a page; elements a head
PAGES = 5
ON_CPU = {"device": "cpu", "enable_memory_saver": False}


def settings(master: str, **more: object) -> dict:
    """The text of --hicache-storage-backend-extra-config."""
    return {
        "local_hostname": "127.0.0.1",
        "master_server_address": master,
        "protocol": "tcp",
        "global_segment_size": 32 << 20,
        "check_server": False,
        **more,
    }


def open_store(pool: HostKVCache, extra: dict, tp_rank: int = 0, tp_size: int = 1, **more) -> MooncakeStore:
    config = HiCacheStorageConfig(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=isinstance(pool, MLATokenToKVPoolHost),
        enable_storage_metrics=True,
        is_page_first_layout=True,
        model_name="company/model",
        extra_config=extra,
        **more,
    )
    store = MooncakeStore(config, pool)
    store.register_mem_pool_host(pool)
    return store


def publish_arguments() -> None:
    """What its scheduler's process does first."""
    publish(ServerArgs(model_path="dummy", device="cpu"), role="scheduler", ranks=SpawnRanks(world_rank=0))


def mha_pool(layout: str, heads: int = HEADS, **more) -> MHATokenToKVPoolHost:
    device = MHATokenToKVPool(64, PAGE, torch.bfloat16, heads, WIDTH, LAYERS, **ON_CPU)
    return MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        4,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=64,
        start_layer=0,
        end_layer=LAYERS,
        **more,
    )


def mla_pool(layout: str) -> MLATokenToKVPoolHost:
    device = MLATokenToKVPool(64, PAGE, torch.bfloat16, 64, 16, LAYERS, **ON_CPU)
    return MLATokenToKVPoolHost(
        device._mla_buffer_info(),
        4,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=64,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def fill(pool: HostKVCache, seed: int) -> torch.Tensor:
    """Other contents in every page; returns the slots of the first PAGES of them."""
    generator = torch.Generator().manual_seed(seed)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=generator))
    return pool.alloc(PAGES * PAGE)


def same_pages(one: HostKVCache, slots: torch.Tensor, other: HostKVCache, others: torch.Tensor) -> bool:
    starts = zip(slots[::PAGE].tolist(), others[::PAGE].tolist(), strict=True)
    return all(torch.equal(one.get_data_page(a), other.get_data_page(b)) for a, b in starts)


def round_trip(pools, extra: dict, **config) -> dict:
    """One engine saves PAGES pages, another one finds and loads them, which gives the pool no memory."""
    saving, loading = pools
    a, b = open_store(saving, extra, **config), open_store(loading, {**extra, "global_segment_size": 0}, **config)
    keys = [f"{extra['local_hostname']}-page-{number}" for number in range(PAGES)]
    slots = fill(saving, 1)
    others = fill(loading, 2)
    before = b.batch_exists(keys)
    saved = a.batch_set_v1(keys[:-1], slots[:-PAGE])
    partly = b.batch_exists(keys), b.batch_get_v1(keys, others)
    again = a.batch_set_v1(keys, slots)  # those that are there are not written again
    loaded = b.batch_get_v1(keys, others)
    found = b.batch_exists(keys)
    stats = a.get_stats()
    return {
        "before": before,
        "saved": saved,
        "partly": partly,
        "again": again,
        "found": found,
        "loaded": loaded,
        "same": same_pages(saving, slots, loading, others),
        "written": sum(stats.backup_pgs),
        "key": a.store.is_exist(f"{a.config_prefix}_{keys[0]}_{a.mla_suffix if a.is_mla_backend else 0}_k"),
    }


def mha(master: str, layout: str) -> dict:
    publish_arguments()
    return round_trip((mha_pool(layout), mha_pool(layout)), settings(master))


def documented(settings: dict) -> dict:
    publish_arguments()
    return round_trip((mha_pool("page_first"), mha_pool("page_first")), settings)


def mla(master: str, layout: str) -> dict:
    """With layer_first a page is several pieces: batch_put_from_multi_buffers and its counterpart."""
    publish_arguments()
    return round_trip((mla_pool(layout), mla_pool(layout)), settings(master))


def groups(master: str) -> dict:
    """The keys of one page are one group of the pool."""
    publish_arguments()
    extra = settings(master, enable_group_semantics=True, extra_backend_tag="tag")
    return round_trip((mha_pool("page_first"), mha_pool("page_first")), extra)


def split_heads(master: str) -> dict:
    """Two ranks save, one of a deployment with half as many loads the heads of both."""
    publish_arguments()
    extra = settings(master)
    shared = {"tp_lcm_size": 2}
    halves = [mha_pool("page_head", HEADS // 2) for _ in range(2)]
    whole = mha_pool("page_head")
    keys = [f"page-{number}" for number in range(PAGES)]
    ranks = [open_store(half, extra, tp_rank=rank, tp_size=2, **shared) for rank, half in enumerate(halves)]
    saved = [store.batch_set_v1(keys, fill(store.mem_pool_host, rank)) for rank, store in enumerate(ranks)]
    one = open_store(whole, extra, should_split_heads=True, **shared)
    others = fill(whole, 9)
    found, loaded = one.batch_exists(keys), one.batch_get_v1(keys, others)
    first = [pool.kv_buffer[:, :PAGES] for pool in halves]  # page_head: [K or V, page, head, ...]
    same = torch.equal(torch.cat(first, dim=2), whole.kv_buffer[:, :PAGES])
    return {"saved": saved, "found": found, "loaded": loaded, "same": same}


def sidecar(master: str) -> dict:
    """The second interface: a pool beside the main one, all of whose pages, or the last of them, must be there."""
    publish_arguments()
    pools = [mha_pool("page_first"), mha_pool("page_first", 2)]
    store = open_store(pools[0], settings(master))
    store.register_mem_host_pool_v2(pools[1], PoolName.DRAFT)
    keys = [f"page-{number}" for number in range(PAGES)]
    slots = [fill(pool, seed) for seed, pool in enumerate(pools)]
    main = store.batch_set_v1(keys, slots[0])

    def draft(first: int, last: int, policy: PoolHitPolicy) -> PoolTransfer:
        indices = slots[1][first * PAGE : last * PAGE]
        return PoolTransfer(PoolName.DRAFT, host_indices=indices, keys=keys[first:last], hit_policy=policy)

    every, trailing = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES
    none = store.batch_exists_v2(keys, [draft(0, 1, every)]).restorable_prefix_pages
    saved = store.batch_set_v2([draft(2, 4, every)])
    holes = store.batch_exists_v2(keys, [draft(2, 3, trailing)]).restorable_prefix_pages
    want = pools[1].kv_buffer.clone()
    pools[1].kv_buffer[:, 2 * PAGE : 4 * PAGE] = 0
    loaded = store.batch_get_v2([draft(1, 4, every)])
    return {
        "main": main,
        "none": none,
        "saved": saved,
        "holes": holes,
        "loaded": loaded,
        "same": torch.equal(pools[1].kv_buffer, want),
    }


def reused_engine(master: str) -> dict:
    """The store stands on the transfer engine of a prefill or decode instance."""
    publish_arguments()
    engine = init_mooncake_transfer_engine("127.0.0.1", gpu_id=0, ib_device="mlx5_0")
    extra = settings(master, protocol="rdma", device_name="mlx5_0")  # it is shared if these are the same
    result = round_trip((mha_pool("page_first"), mha_pool("page_first")), extra)
    store = open_store(mha_pool("page_first"), extra)
    return {**result, "hostname": store.store.get_hostname() == engine.get_session_id()}


def standalone(master: str, client: str, metrics_port: int) -> dict:
    """The pool's memory belongs to a mooncake_client of the host; so do the engine's own buffers."""
    publish_arguments()
    pools = [mha_pool("page_first", allocator_type="mooncake") for _ in range(2)]
    extra = settings(
        master,
        client_server_address=client,
        standalone_storage=True,
        check_server=True,  # waits until the master lists a segment
        master_metrics_port=metrics_port,
    )
    return round_trip(pools, extra)


def embeddings(master: str) -> dict:
    class Launch:
        extra_config = settings(master)

    store = MooncakeEmbeddingStore(Launch)
    tensors = [torch.randn(8, 64) for _ in range(3)]
    into = [torch.zeros(8, 64) for _ in range(3)]
    for tensor in (*tensors, *into):
        store.register_buffer(tensor)
    hashes = ["a", "b", "c"]
    size = tensors[0].nbytes
    put = store.batch_put(hashes[:2], [tensor.data_ptr() for tensor in tensors[:2]], [size] * 2)
    again = store.batch_put(hashes, [tensor.data_ptr() for tensor in tensors], [size] * 3)
    exist = store.batch_is_exist([*hashes, "d"])
    got = store.batch_get([*hashes, "d"], [*(tensor.data_ptr() for tensor in into), into[0].data_ptr()], [size] * 4)
    same = [torch.equal(a, b) for a, b in zip(tensors, into, strict=True)]
    halves = [[tensor.data_ptr(), tensor.data_ptr() + size // 2] for tensor in tensors]
    pieces = store.batch_put_from_multi_buffers(["e"], halves[:1], [[size // 2, size // 2]])
    into[2].zero_()
    back = [into[2].data_ptr(), into[2].data_ptr() + size // 4]
    joined = store.batch_get_into_multi_buffers(["e"], [back], [[size // 4, size * 3 // 4]])
    return {
        "put": put,
        "again": again,
        "exist": exist,
        "got": got,
        "same": same,
        "pieces": pieces,
        "joined": joined,
        "joined same": torch.equal(into[2], tensors[0]),
    }


def own_test(master: str) -> dict:
    """The test that SGLang's wheel has of this back end; it fails by an exception."""
    os.environ.update(
        MOONCAKE_MASTER=master,
        MOONCAKE_PROTOCOL="tcp",
        MOONCAKE_LOCAL_HOSTNAME="127.0.0.1",
        MOONCAKE_GLOBAL_SEGMENT_SIZE=str(32 << 20),
    )
    name = "sglang.srt.mem_cache.storage.mooncake_store.test_mooncake_store"
    sys.modules.pop(name, None)
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return {}
