"""LMCache on a pool: its remote back end with its own Mooncake connector and its own chunks of CPU memory, its look-up
client, and the channel by which its servers read from one another.

Forked by zygote.py; every function is one process and says what its calls returned.  There are no stand-ins.
"""

import asyncio
import threading
import time
from collections.abc import Callable

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig, load_engine_config_with_overrides
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters.mooncake_store_l2_adapter import (
    MooncakeStoreL2AdapterConfig,
    _create_mooncake_store_l2_adapter,
)
from lmcache.v1.lookup_client.mooncake_lookup_client import MooncakeLookupClient
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from lmcache.v1.token_database import ChunkedTokenDatabase

HOST = "127.0.0.1"
CHUNK, LAYERS, HEADS, WIDTH = 32, 2, 2, 16  # tokens; elements a head
METADATA = LMCacheMetadata(
    model_name="company/model",
    world_size=1,
    local_world_size=1,
    worker_id=0,
    local_worker_id=0,
    kv_dtype=torch.bfloat16,
    kv_shape=(LAYERS, 2, CHUNK, HEADS, WIDTH),
    chunk_size=CHUNK,
)


class Engine:
    """What an engine with LMCache has of it."""

    def __init__(self, config: LMCacheEngineConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.chunks = LocalCPUBackend(config, METADATA)
        self.remote = RemoteBackend(config, METADATA, loop, self.chunks)
        assert self.remote.connection is not None
        self.connector = self.remote.connection.getWrappedConnector()
        assert self.connector.store.health_check() == 0

    def compute(self, seed: int, tokens: int) -> MemoryObj:
        """A chunk with the KV cache of `tokens` tokens."""
        shape = torch.Size([2, LAYERS, tokens, HEADS * WIDTH])
        chunk = self.chunks.allocate([shape], METADATA.get_dtypes(), self.connector.meta_fmt)
        chunk.tensor.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
        return chunk

    def put(self, keys: list[CacheEngineKey], chunks: list[MemoryObj]) -> None:
        """As one batch but for the last, and until all are there."""
        done: list[CacheEngineKey] = []
        self.remote.batched_submit_put_task(keys[:-1], chunks[:-1], on_complete_callback=done.append)
        self.remote.submit_put_task(keys[-1], chunks[-1]).result(10)
        poll(lambda: len(done), lambda number: number == len(keys) - 1)


def settings(master: str, save_chunk_meta: bool, address: str, gives: int = 32 << 20) -> LMCacheEngineConfig:
    """The text of its configuration file.  `address`: what the master's address is called there; `gives`: bytes."""
    return LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        local_cpu=False,
        max_local_cpu_size=0.03,
        remote_url=f"mooncakestore://{master}/",
        remote_serde="naive",
        pre_caching_hash_algorithm="sha256_cbor",
        extra_config={
            "local_hostname": HOST,
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "device_name": "",
            address: master,
            "global_segment_size": gives,
            "local_buffer_size": 16 << 20,
            "transfer_timeout": 10,
            "save_chunk_meta": save_chunk_meta,
            "mooncake_prefer_local_alloc": True,
        },
    )


def running_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def remote(master: str, save_chunk_meta: bool, address: str) -> dict:
    """One engine puts what it has computed, another one gets it; the last chunk is not full."""
    loop = running_loop()
    a, b = (Engine(settings(master, save_chunk_meta, address, gives), loop) for gives in (32 << 20, 0))
    keys = [CacheEngineKey(METADATA.model_name, 1, 0, number, torch.bfloat16) for number in range(5)]
    chunks = [a.compute(number, CHUNK if number < 3 else 9) for number in range(4)]
    want = [chunk.tensor.clone() for chunk in chunks]
    before = [b.remote.contains(key) for key in keys]
    a.put(keys[:4], chunks)
    after = [b.remote.contains(key) for key in keys]
    found = asyncio.run_coroutine_threadsafe(b.remote.batched_async_contains("request", keys), loop).result(10)
    got = b.remote.batched_get_blocking(keys)
    a.remote.close()  # with it goes the pool's memory
    result = {
        "before": before,
        "after": after,
        "found": found,
        "got": [chunk and torch.equal(chunk.tensor, value) for chunk, value in zip(got, [*want, None], strict=True)],
        "zero copy": b.connector.registered_buffer_ptr is not None,
        "then": [b.remote.contains(key) for key in keys],
    }
    b.remote.close()
    return result | {"closed": b.connector.store.health_check()}


def documented() -> dict:
    """By the file that LMCACHE_CONFIG_FILE names."""
    config = load_engine_config_with_overrides(overrides={"max_local_cpu_size": 0.03})
    engine = Engine(config, running_loop())
    keys = [CacheEngineKey(METADATA.model_name, 1, 0, number, torch.bfloat16) for number in range(3)]
    chunks = [engine.compute(number, CHUNK) for number in range(2)]
    want = [chunk.tensor.clone() for chunk in chunks]
    engine.put(keys[:2], chunks)
    got = engine.remote.batched_get_blocking(keys)
    same = [chunk is not None and torch.equal(chunk.tensor, want[number]) for number, chunk in enumerate(got)]
    return {"found": [engine.remote.contains(key) for key in keys], "got": same}


def lookup(master: str) -> dict:
    """The scheduler asks the pool how much of a prompt it has, by the chunks' own keys."""
    config, loop = settings(master, True, "master_server_address"), running_loop()
    engine = Engine(config, loop)
    client = MooncakeLookupClient(config, METADATA, master)
    tokens = list(range(1000, 1000 + 3 * CHUNK + 5))
    keys = [key for _, _, key in ChunkedTokenDatabase(config, METADATA).process_tokens(tokens)]
    none = client.lookup(tokens)
    engine.put(keys[:2], [engine.compute(number, CHUNK) for number in range(2)])
    other = [1, *tokens[1:]]
    return {"chunks": len(keys), "none": none, "two": client.lookup(tokens), "other": client.lookup(other)}


def l2_adapter(master: str) -> str:
    """What its multi-process mode says, which speaks to the C++ library by an extension of its own."""
    config = MooncakeStoreL2AdapterConfig.from_dict({"type": "mooncake_store", "master_server_addr": master})
    try:
        _create_mooncake_store_l2_adapter(config)
    except RuntimeError as error:
        return str(error)
    return ""


SIZE = 4 << 20


class Channel:
    """One server's memory, which others may read."""

    def __init__(self, port: int, memory: torch.Tensor) -> None:
        from lmcache.v1.distributed.transfer_channel.impl.mooncake_te_impl import (
            create_mooncake_te_transfer_channel_context,
        )

        self.memory = memory
        description = L1MemoryDesc(ptr=memory.data_ptr(), size=memory.nbytes, align_bytes=4096)
        self.url = f"{HOST}:{port}"
        self.context = create_mooncake_te_transfer_channel_context(description, self.url, self.url)

    def read(self, peer: str, here: list[tuple[int, int]], there: list[tuple[int, int]]) -> list[bool]:
        addresses = [self.context.get_transfer_channel_address(places) for places in (here, there)]
        client = self.context.get_transfer_channel_client(peer)
        task = client.submit_read(*addresses)
        return poll(lambda: client.query_read_status(task), lambda status: status.is_finished()).succeeded_mask


def poll(ask: Callable[[], object], wanted: Callable[[object], bool], limit: float = 10):
    end = time.monotonic() + limit
    while not wanted(value := ask()):
        assert time.monotonic() < end, f"still {value}"
        time.sleep(0.001)
    return value


def pattern() -> torch.Tensor:
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def channel_server(port: int) -> None:
    channel = Channel(port, pattern())
    threading.Event().wait()  # until the test kills it
    channel.context.close()


def channel_reader(port: int, peer: str) -> dict:
    channel = Channel(port, torch.zeros(SIZE, dtype=torch.uint8))
    there = [(4096 * 9, 4096), (0, 100_000), (SIZE - 1, 1)]
    here = [(0, 4096), (4096, 100_000), (SIZE - 1, 1)]
    done = channel.read(peer, here, there)
    want = torch.zeros(SIZE, dtype=torch.uint8)
    for (to, size), (start, _) in zip(here, there, strict=True):
        want[to : to + size] = pattern()[start : start + size]
    same = torch.equal(channel.memory, want)
    channel.context.close()
    return {"done": done, "same": same}
