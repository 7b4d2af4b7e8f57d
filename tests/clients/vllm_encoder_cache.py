"""vLLM's caches of what encoders compute: its own store client and publisher, and the transfer that its encoder and its
prefill instances hand embeddings over with.

Forked by zygote.py; every function is one process and says what its calls returned.
"""

import json
import os
import signal
import time
from pathlib import Path

import torch
from vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding.backend import MooncakeEmbeddingStoreBackend
from vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding.data import TensorSpec, make_embedding_key
from vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding.store_client import (
    EmbeddingStoreOperationError,
    create_mooncake_embedding_store_client,
)

HOST = "127.0.0.1"
HIDDEN = 64


def embedding(tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype), tensor.nbytes)


def client(read_buffer_bytes: int = 1 << 20):
    return create_mooncake_embedding_store_client(read_buffer_bytes)


def same(loaded: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return loaded.keys() == want.keys() and all(torch.equal(loaded[key], want[key]) for key in want)


def store_client() -> dict:
    """One instance puts, another one loads.  MOONCAKE_CONFIG_PATH names the pool."""
    a, b = client(), client(10_000)  # of which one embedding is larger, and two are together
    tensors = {f"key-{tokens}": embedding(tokens) for tokens in (30, 40, 50, 90)}
    tensors["float32"] = embedding(7, torch.float32)
    none = b.batch_exists(list(tensors))
    for key, tensor in tensors.items():
        a.put_tensor(key, tensor)
    a.put_tensor("key-30", embedding(31))  # is there: the old one stays
    specs = {key: spec(tensor) for key, tensor in tensors.items()}
    loaded = b.load_tensors({**specs, "missing": specs["key-30"]}, "cpu")
    wrong = b.load_tensors({"key-40": spec(embedding(41)), "key-50": spec(embedding(50, torch.float16))}, "cpu")
    try:
        a.put_tensor("strided", embedding(8)[:, ::2])
    except EmbeddingStoreOperationError as error:
        refused = str(error)
    del tensors["key-90"]  # larger than what b reads into
    result = {
        "none": none,
        "all": b.batch_exists(list(specs)),
        "same": same(loaded, tensors),
        "wrong": list(wrong),
        "refused": refused,
        "healthy": not (a._poisoned or b._poisoned),
    }
    b.close()
    a.close()
    return result


def full_pool() -> dict:
    """Puts that find no room are normal failures: the client goes on."""
    a = client()
    tensor = torch.zeros(1 << 13, HIDDEN)  # 2 MiB
    stored = []
    for number in range(40):  # 80 MiB into 32, which the look-up leases
        try:
            a.put_tensor(f"big-{number}", tensor)
        except EmbeddingStoreOperationError:
            break
        stored.append(a.exists(f"big-{number}"))
    then = a.exists(f"big-{number - 1}")
    return {"stored": 8 < len(stored) < 40 and all(stored), "healthy": not a._poisoned, "then": then}


def without_master(master: int, master_starts: str) -> dict:
    """The master dies and comes back: what fails meanwhile is computed instead, and nobody gives up for good."""
    a = client()
    key, tensor = "key", embedding(30)
    a.put_tensor(key, tensor)
    os.kill(master, signal.SIGKILL)
    try:
        a.put_tensor("while it is away", tensor)
        put = "stored"
    except EmbeddingStoreOperationError:
        put = "refused"
    meanwhile = [a.exists(key), put, len(a.load_tensors({key: spec(tensor)}, "cpu"))]
    Path(master_starts).touch()
    end = time.monotonic() + 20
    while not a.exists(key):
        assert time.monotonic() < end, "it is still lost"
        time.sleep(0.05)
    loaded = a.load_tensors({key: spec(tensor)}, "cpu")
    return {"meanwhile": meanwhile, "same": same(loaded, {key: tensor}), "healthy": not a._poisoned}


def publisher() -> dict:
    """The encoder's side as a whole: what it has computed is published behind its back, and found by the next one."""
    limits = {"max_pending_items": 8, "max_pending_bytes": 1 << 20}
    a, b = (MooncakeEmbeddingStoreBackend(client(), "model@v3", **limits) for _ in range(2))
    outputs = {f"image-{tokens}": embedding(tokens) for tokens in (20, 21, 22)}
    specs = {name: spec(tensor) for name, tensor in outputs.items()}
    cold = a.resolve_inputs(specs, {}, "cpu")
    for name, tensor in outputs.items():
        a.save_output(name, tensor)
    a.save_output("never asked for", embedding(5))
    end = time.monotonic() + 10
    while not all(b.store_client.batch_exists([make_embedding_key("model@v3", name) for name in outputs])):
        assert time.monotonic() < end, "not published"
        time.sleep(0.002)
    cache = {"image-20": outputs["image-20"]}
    warm = b.resolve_inputs(specs, cache, "cpu")
    a.reap()
    result = {
        "cold": sorted(cold),
        "warm": sorted(warm),
        "same": same(cache, outputs),
        "unasked": b.store_client.exists(make_embedding_key("model@v3", "never asked for")),
    }
    b.shutdown()
    a.shutdown()
    return result


def consumer(reply: str) -> dict:
    """A slab of a prefill instance, whose parts an encoder writes to; `reply`: the file that says where."""
    from vllm.distributed.ec_transfer.ec_connector.mooncake.memory import ConsumerMemoryPool
    from vllm.distributed.ec_transfer.ec_connector.mooncake.transfer import MooncakeTransfer, ensure_mooncake_available

    ensure_mooncake_available()
    transfer = MooncakeTransfer(HOST, "rdma")
    pool = ConsumerMemoryPool(1 << 20, transfer)
    pool.prepare(torch.device("cpu"))
    wanted = {f"image-{tokens}": embedding(tokens) for tokens in (10, 11, 12)}
    places = {key: pool.try_allocate(t.nbytes, tuple(t.shape), t.dtype) for key, t in wanted.items()}
    for place in places.values():
        place.tensor.zero_()
    addresses = {key: place.tensor.data_ptr() for key, place in places.items()}
    finished = torch.zeros(1, dtype=torch.uint8)  # the encoder's last word
    registered = transfer.register_memory(finished)
    message = {"session": transfer.local_session(), "places": addresses, "finished": finished.data_ptr()}
    Path(f"{reply}.part").write_text(json.dumps(message))
    Path(f"{reply}.part").rename(reply)
    end = time.monotonic() + 20
    while not finished.item():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.002)
    result = {
        "registered": registered,
        "same": [torch.equal(places[key].tensor, tensor) for key, tensor in wanted.items()],
        "given back": transfer.unregister_memory(finished),
        "twice": transfer.unregister_memory(finished),
    }
    for key, place in places.items():
        pool.publish(key, place)
    resident = pool.take_resident("image-11", (11, HIDDEN), "bfloat16")
    result["resident"] = resident is not None and torch.equal(resident, wanted["image-11"])
    pool.close()
    transfer.close()
    return result


def producer(reply: str) -> dict:
    """An encoder: one embedding is staged in a slab, two are views of one tensor that is registered as it is."""
    from vllm.distributed.ec_transfer.ec_connector.mooncake.memory import ProducerMemoryPool
    from vllm.distributed.ec_transfer.ec_connector.mooncake.transfer import MooncakeTransfer

    end = time.monotonic() + 20
    while not Path(reply).exists():
        assert time.monotonic() < end, "nobody wants anything"
        time.sleep(0.002)
    peer = json.loads(Path(reply).read_text())
    transfer = MooncakeTransfer(HOST, "rdma")
    pool = ProducerMemoryPool(1 << 20, transfer)
    staged = pool.stage([embedding(10)])
    both = torch.cat([embedding(11), embedding(12)])
    views = [both[:11], both[11:]]
    acquired = transfer.acquire_sources(views)
    shared = transfer.acquire_sources(views[:1])
    sources = [*staged.tensors, *views]
    transfer.write(
        peer["session"],
        [tensor.data_ptr() for tensor in sources],
        list(peer["places"].values()),
        [tensor.nbytes for tensor in sources],
    )
    pool.release(staged)
    released = [transfer.release_sources(acquired), transfer.release_sources(shared)]
    word = torch.ones(1, dtype=torch.uint8)
    mark = transfer.acquire_sources([word])
    transfer.write(peer["session"], mark, [peer["finished"]], [1])
    try:
        transfer.write(peer["session"], mark, [peer["finished"] + 4096], [1])
        beyond = "written"
    except RuntimeError as error:
        beyond = str(error).rpartition(" with ")[2]
    pool.close()
    transfer.close()
    left = len(transfer._source_registrations)
    return {"acquired": len(acquired), "released": released, "beyond": beyond, "left": left}
