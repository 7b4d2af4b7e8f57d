"""SGLang's direct linker: pages go between its device pools and our pool without a host tier, and come back layer by
layer in get sessions.  The device here is the CPU; the pools are those of sparse attention (DSA), with an indexer.

Forked by zygote.py; every function is one process and says what its calls returned.
"""

from types import SimpleNamespace as Names

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_direct_linker import MooncakeDirectLinker
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from tests.clients.sglang_hicache import LAYERS, ON_CPU, PAGES, publish_arguments, settings

PAGE = 64  # tokens
SLOTS = 16 * PAGE
LATENT, ROPE, INDEX = 64, 16, 128  # elements a token
ROW = LATENT + ROPE


class Instance:
    def __init__(self, master: str) -> None:
        self.pool = DSATokenToKVPool(
            SLOTS,
            PAGE,
            LATENT,
            torch.bfloat16,
            ROPE,
            LAYERS,
            index_head_dim=INDEX,
            kv_cache_dim=LATENT + ROPE,
            **ON_CPU,
        )
        allocator = Names(get_kvcache=lambda: self.pool)
        params = CacheInitParams(False, None, allocator, PAGE)
        self.linker = MooncakeDirectLinker(
            Names(enable_linker_mla_dedup=False),
            params,
            components={ComponentType.FULL},
            extra_config=settings(master),
        )

    def pages(self) -> list[torch.Tensor]:
        """Of all layers: what is kept of each page, as bytes."""
        latent = [buffer.view(torch.uint8).view(-1, PAGE * ROW * 2) for buffer in self.pool.kv_buffer]
        return [*latent, *self.pool.index_k_with_scale_buffer]

    def transfer(self, keys: list[str], first: int) -> list[PoolTransfer]:
        indices = torch.arange(first * PAGE, (first + len(keys)) * PAGE)
        return [PoolTransfer(PoolName.KV, host_indices=indices, device_indices=indices, keys=keys)]


def layers(master: str) -> dict:
    """One instance offloads its pages, another one loads them elsewhere, layer by layer."""
    publish_arguments()
    a, b = Instance(master), Instance(master)
    for seed, instance in enumerate((a, b)):
        generator = torch.Generator().manual_seed(seed)
        for pages in instance.pages():
            pages.copy_(torch.randint(0, 256, pages.shape, dtype=torch.uint8, generator=generator))
    want = [pages.clone() for pages in b.pages()]
    for there, pages in zip(want, a.pages(), strict=True):
        there[4 : 4 + PAGES] = pages[1 : 1 + PAGES]
    keys = [f"page-{number}" for number in range(PAGES)]
    none = b.linker.lookup("request", b.transfer(keys, 4))
    a.linker.offload(a.transfer(keys, 1))
    a.linker.offload_queue.join()
    offloaded = a.linker.pop_completed_offload()
    found = b.linker.lookup("request", b.transfer([*keys, "page-5"], 4))
    b.linker.load("request", b.transfer(keys, 4))
    index = b.linker.start_layer_wise_loading()
    b.linker.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        b.linker.layer_done_counter.wait_until(layer)
    landed = b.linker.finish_layer_wise_loading(index)
    same = all(torch.equal(pages, there) for pages, there in zip(b.pages(), want, strict=True))
    # What is gone by the time it is loaded fails, and is told.
    a.linker.storage.store.remove_all(True)
    b.linker.load("later", b.transfer(keys, 4))
    lost = b.linker.finish_layer_wise_loading(b.linker.start_layer_wise_loading())
    b.linker.close()
    a.linker.close()
    return {"none": none, "offloaded": offloaded, "found": found, "landed": landed, "same": same, "lost": lost}
