"""KV caches of one rank, in the orders that engines keep them in, with contents that say where they belong."""

from types import SimpleNamespace

import numpy as np

from mooncake.vllm.push.geometry import layers_of
from mooncake.vllm.push.heads import Heads
from tests.connector.test_layout import Tensor

LAYERS, BLOCKS, HEADS, BLOCK, WIDTH = 3, 9, 8, 4, 2  # KV heads of the model; tokens of a block; numbers of K, and of V

# vLLM 0.32: one view [blocks, heads, tokens, K and V]; 0.25.1: [blocks, 2, tokens, heads, width], 2 first, MLA's.
KINDS = ("heads first", "tokens first", "blocks outermost", "K and V apart", "K and V outermost", "kernel blocks")


class CpuTensor(Tensor):
    device = SimpleNamespace(type="cpu")


def content(layer: int, head: int, block: int) -> np.ndarray:
    """[tokens, 2, width] of a head in a block that is called `block`."""
    start = ((layer * 64 + head) * 1024 + block) * BLOCK * 2 * WIDTH
    return np.arange(start, start + BLOCK * 2 * WIDTH).reshape(BLOCK, 2, WIDTH)


class Memory:
    """`caches` and `layers` are what a connector sees; `views` are [blocks, heads, tokens, 2, width] of each layer."""

    def __init__(self, kind: str, heads: Heads, dtype: type = np.float32, blocks: int = BLOCKS) -> None:
        self.heads = heads
        self._blocks = blocks
        self._held: list[np.ndarray] = []
        made = [self._layer(kind, i, heads.size, dtype) for i in range(LAYERS)]
        self.caches = {f"layers.{i}": tensor for i, (tensor, _) in enumerate(made)}
        self.views = [view for _, view in made]
        self.layers = layers_of(self.caches, blocks, BLOCK)

    def _layer(self, kind: str, layer: int, heads: int, dtype: type) -> tuple[CpuTensor, np.ndarray]:
        if kind == "blocks outermost":
            if not self._held:
                self._held.append(np.full((self._blocks, LAYERS, heads, BLOCK, 2 * WIDTH), -1, dtype))
            cache = self._held[0][:, layer]
            return CpuTensor(cache, self._held[0]), cache.reshape(self._blocks, heads, BLOCK, 2, WIDTH)
        order = {
            "heads first": (self._blocks, heads, BLOCK, 2 * WIDTH),
            "tokens first": (self._blocks, BLOCK, heads, 2 * WIDTH),
            "K and V apart": (self._blocks, 2, BLOCK, heads, WIDTH),
            "K and V outermost": (2, self._blocks, BLOCK, heads, WIDTH),
            "kernel blocks": (self._blocks * 2, heads, BLOCK // 2, 2 * WIDTH),
        }[kind]
        memory = np.full(order, -1, dtype)
        self._held.append(memory)
        if kind == "heads first":
            return CpuTensor(memory), memory.reshape(self._blocks, heads, BLOCK, 2, WIDTH)
        if kind == "tokens first":
            cache = memory.transpose(0, 2, 1, 3)
            return CpuTensor(cache, memory), memory.reshape(self._blocks, BLOCK, heads, 2, WIDTH).transpose(
                0, 2, 1, 3, 4
            )
        if kind == "K and V apart":
            return CpuTensor(memory), memory.transpose(0, 3, 2, 1, 4)
        if kind == "K and V outermost":
            return CpuTensor(memory), memory.transpose(1, 3, 2, 0, 4)
        apart = memory.reshape(self._blocks, 2, heads, BLOCK // 2, 2, WIDTH)
        return CpuTensor(memory), KernelBlocks(apart)

    def fill(self, block: int, called: int, layers: tuple[int, ...] = tuple(range(LAYERS))) -> None:
        for layer in layers:
            for head in range(self.heads.size):
                self.views[layer][block, head] = content(layer, self.heads.first + head, called)

    def check(self, block: int, called: int) -> None:
        """Everything of this block is that of one that was called so."""
        for layer, view in enumerate(self.views):
            for head in range(self.heads.size):
                expected = content(layer, self.heads.first + head, called)
                assert (np.asarray(view[block, head]) == expected).all(), (layer, head, block, called)

    def touched(self, but: set[int]) -> set[int]:
        """Blocks outside of `but` in which anything was written."""
        others = set(range(self._blocks)) - but
        return {
            block
            for block in others
            for view in self.views
            for head in range(self.heads.size)
            if (np.asarray(view[block, head]) != -1).any()
        }


class KernelBlocks:
    """[blocks, heads, tokens, 2, width] over [blocks, kernel blocks, heads, fewer tokens, 2, width]."""

    def __init__(self, apart: np.ndarray) -> None:
        self._apart = apart

    def __getitem__(self, index: tuple[int, int]) -> np.ndarray:
        block, head = index
        return self._apart[block, :, head].reshape(BLOCK, 2, WIDTH)

    def __setitem__(self, index: tuple[int, int], value: np.ndarray) -> None:
        block, head = index
        self._apart[block, :, head] = value.reshape(2, BLOCK // 2, 2, WIDTH)
