"""Workers of tensor parallel sizes 1, 2 and 4 that share one pool: what the ranks of one size save, those of the others
load.

Runs in the vLLM environment: `python -m tests.connector.sharing MODEL`.
"""

import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from mooncake.cli.engine_settings import write_pool_config
from mooncake.vllm.blocks import Blocks
from mooncake.vllm.plan import StepPlan
from mooncake.vllm.settings import Settings, read_pool_config
from mooncake.vllm.worker import WorkerHalf
from tests.processes import Master, wait_until

BLOCK, HEADS, WIDTH, LAYERS, BLOCKS, SIZES = 32, 4, 8, 2, 10, (1, 2, 4)
SAVED, LOADED = [2, 5, 7], [1, 3, 8]  # blocks of who saves, and of who loads
ORDERS = {
    "heads outermost": (0, 1, 2, 3),
    "tokens outermost": (0, 2, 1, 3),  # a head's part of a block is a piece for each token
}


def content(seed: int, heads: int) -> torch.Tensor:
    """Of all layers and blocks, [layer, block, head, token, content]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((LAYERS, BLOCKS, heads, BLOCK, WIDTH), generator=generator)


class Rank:
    """One worker; `values`: its heads of all blocks.  With `shared` 0 the model has one latent head."""

    def __init__(self, model: str, size: int, rank: int, shared: int, order: tuple[int, ...], values: torch.Tensor):
        common = {"block_size": BLOCK, "num_kv_heads": values.shape[2], "dtype": torch.float32}
        if shared:
            spec = FullAttentionSpec(**common, head_size=WIDTH // 2, max_tp_shards=HEADS)
        else:
            spec = MLAAttentionSpec(**common, head_size=WIDTH)
        config = EngineArgs(
            model=model, dtype="float32", enforce_eager=True, max_model_len=1024, block_size=BLOCK,
            kv_transfer_config=KVTransferConfig(kv_connector="MooncakeStoreConnector", kv_role="kv_both"),
        ).create_engine_config()  # fmt: skip
        config.parallel_config.tensor_parallel_size = size
        config.parallel_config.rank = rank
        memory = [layer.permute(order).contiguous() for layer in values]
        self.caches = {f"layers.{i}": layer.permute(*torch.tensor(order).argsort()) for i, layer in enumerate(memory)}
        groups = [KVCacheGroupSpec(list(self.caches), spec)]
        self.half = WorkerHalf(
            read_pool_config(), Settings(shared_tp=shared), config, KVCacheConfig(BLOCKS, [], groups)
        )
        with set_current_vllm_config(config):
            self.half.register(self.caches)
        (report,) = self.half.take_report().heads.values()
        self.heads = report[0]

    def save(self, hashes: list[bytes]) -> None:
        self.half.start_saves(StepPlan(saves=[Blocks(0, "", hashes, SAVED)], job=1))
        saved = wait_until(self.half.take_report, 10).saved[1]
        assert not saved.failed, saved

    def load(self, hashes: list[bytes]) -> torch.Tensor:
        """[layer, block, head, token, content] of what came."""
        self.half.start_loads(StepPlan(loads={"r": [Blocks(0, "", hashes, LOADED)]}))
        wait_until(lambda: self.half.take_received(idle=False), 10)
        report = self.half.take_report()
        assert report is None, report
        return torch.stack([cache[LOADED] for cache in self.caches.values()])


def share(model: str, order: tuple[int, ...], shared: int) -> None:
    """With every size as the one that saves."""
    for number, size in enumerate(SIZES):
        values = content(number, HEADS if shared else 1)
        hashes = [bytes([number, i]) + os.urandom(14) for i in range(len(SAVED))]
        parts = values.chunk(size, dim=2) if shared else [values] * size
        savers = [Rank(model, size, rank, shared, order, part) for rank, part in enumerate(parts)]
        for rank in savers:
            rank.save(hashes)
        for other in SIZES:
            parts = torch.zeros_like(values).chunk(other, dim=2) if shared else [torch.zeros_like(values)] * other
            loaders = [Rank(model, other, rank, shared, order, part) for rank, part in enumerate(parts)]
            assert {head for rank in loaders for head in rank.heads} == {head for rank in savers for head in rank.heads}
            found = [rank.load(hashes) for rank in loaders]
            loaded = torch.cat(found, dim=2) if shared else found[-1]
            assert (loaded == values[:, SAVED]).all(), f"size {size} to size {other}"
            for rank in loaders:
                rank.half.close()
        for rank in savers:
            rank.half.close()


def main() -> None:
    logging.disable(logging.ERROR)
    master = Master()
    try:
        with tempfile.TemporaryDirectory(prefix="sharing-") as folder:
            config = Path(folder) / "pool.json"
            write_pool_config(config, master.port, 4 << 20)
            os.environ["MOONCAKE_CONFIG_PATH"] = str(config)
            os.environ["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"] = "127.0.0.1"
            began = time.monotonic()
            for name, order in ORDERS.items():
                share(sys.argv[1], order, shared=4)
                print(f"{name}: shared ({time.monotonic() - began:.1f} s)")
            share(sys.argv[1], ORDERS["heads outermost"], shared=0)
            print(f"one latent head: shared ({time.monotonic() - began:.1f} s)")
    finally:
        master.stop()


if __name__ == "__main__":
    main()
