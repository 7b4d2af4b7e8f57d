"""Kinds of models for the engine without one: which groups of layers they have, and what a forward pass would do to
each group's blocks.

All groups lie in the same memory, one layer of each over the other, as vLLM lays them: a block belongs to one group at
a time, and a block that is used for the wrong one is seen.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

HEADS, BLOCK, WIDTH, LAYERS = 2, 32, 8, 3
PAGE = HEADS * BLOCK * WIDTH  # int32 numbers of one block and layer
CONVOLUTION, STATE = (2, 16), (3, 32)  # of one block and layer


class Attention(NamedTuple):
    """Keys and values of positions; `window` 0: of all, else a token sees so many, itself among them."""

    block: int = BLOCK
    window: int = 0

    @property
    def heads(self) -> int:
        return PAGE // self.block // WIDTH

    def spec(self) -> FullAttentionSpec | SlidingWindowSpec:
        shape = {"block_size": self.block, "num_kv_heads": self.heads, "head_size": WIDTH // 2, "dtype": torch.float32}
        return SlidingWindowSpec(**shape, sliding_window=self.window) if self.window else FullAttentionSpec(**shape)

    def caches(self, layer: torch.Tensor) -> torch.Tensor:
        return layer.view(-1, self.heads, self.block, WIDTH)

    def forward(self, layers: list[torch.Tensor], table: list[int], numbers: np.ndarray, done: int, name: str) -> None:
        """Check what is read of the first `done` positions, and write those behind."""
        positions = np.arange(max(0, done - self.window + 1) if self.window else 0, len(numbers))
        values = torch.from_numpy(numbers[positions].astype(np.int32)).view(-1, 1, 1)
        blocks = torch.tensor([table[p // self.block] for p in positions])
        assert blocks.all(), f"{name}: a null block where KV is needed"
        slots, read = torch.from_numpy(positions % self.block), done - positions[0]
        for layer in layers:
            found = layer[blocks[:read], :, slots[:read], :]
            wrong = (found != values[:read]).flatten(1).any(1).nonzero().flatten().tolist()
            assert not wrong, f"{name}: {len(wrong)} of {read} positions hold other tokens' KV, from {wrong[0]}"
            layer[blocks[read:], :, slots[read:], :] = values[read:]

    def check_value(self, value: bytes, numbers: np.ndarray) -> bool:
        """Whether this is the value of the last block of these tokens."""
        found = np.frombuffer(value, np.int32).reshape(-1, self.block, WIDTH)
        return bool((found == numbers[-self.block :].astype(np.int32)[None, :, None]).all())


class States(NamedTuple):
    """One state a block, which says all of the tokens up to some place in it; two tensors a layer."""

    block: int = BLOCK

    def spec(self) -> MambaSpec:
        return MambaSpec(
            block_size=self.block, shapes=(CONVOLUTION, STATE), dtypes=(torch.float32, torch.float32),
            page_size_padded=PAGE * 4, mamba_cache_mode="align",
        )  # fmt: skip

    def caches(self, layer: torch.Tensor) -> list[torch.Tensor]:
        pages, offset, found = layer.view(-1, PAGE), 0, []
        for shape in (CONVOLUTION, STATE):
            size = shape[0] * shape[1]
            found.append(pages[:, offset : offset + size].unflatten(1, shape))
            offset += size
        return found

    def forward(
        self, layers: list[list[torch.Tensor]], table: list[int], numbers: np.ndarray, done: int, name: str
    ) -> None:
        target = table[(len(numbers) - 1) // self.block]
        assert target, f"{name}: a null block where the state goes"
        for layer in layers:
            for tensor in layer:
                if done:
                    found = tensor[table[(done - 1) // self.block]]
                    assert (found == int(numbers[done - 1])).all(), f"{name}: not the state behind {done} tokens"
                tensor[target] = int(numbers[-1])

    def check_value(self, value: bytes, numbers: np.ndarray) -> bool:
        return bool((np.frombuffer(value, np.int32) == int(numbers[-1])).all())


KINDS: dict[str, tuple[Attention | States, ...]] = {
    "full": (Attention(),),
    "window": (Attention(window=70),),
    "hybrid": (Attention(), Attention(window=70), Attention(window=33)),
    "sizes": (Attention(block=64), Attention(window=50), Attention(window=200)),
    "mamba": (Attention(), States(), States()),
    "lagging": (Attention(), Attention(window=70)),  # as behind a speculator
    "untold": (Attention(), Attention(window=70)),  # by a vLLM that does not tell its manager of the KV cache: 0.25.1
}


class Model:
    """The KV cache of a model of some kind."""

    def __init__(self, kind: str, num_blocks: int) -> None:
        self.groups = KINDS[kind]
        self.lag = int(kind == "lagging")
        self.states = any(isinstance(group, States) for group in self.groups)
        memory = torch.zeros((LAYERS, num_blocks, PAGE), dtype=torch.int32)
        self._layers = [[group.caches(layer) for layer in memory] for group in self.groups]
        names = [[f"layers.{i * len(self.groups) + g}" for i in range(LAYERS)] for g in range(len(self.groups))]
        specs = [KVCacheGroupSpec(each, group.spec()) for each, group in zip(names, self.groups, strict=True)]
        self.config = KVCacheConfig(num_blocks, [], specs)
        self.caches: dict[str, Any] = {}
        for each, layers in zip(names, self._layers, strict=True):
            self.caches |= dict(zip(each, layers, strict=True))

    def forward(self, tables: tuple[list[int], ...], numbers: np.ndarray, done: int, name: str) -> None:
        for group, layers, table in zip(self.groups, self._layers, tables, strict=True):
            group.forward(layers, table, numbers, done, name)
