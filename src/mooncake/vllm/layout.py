"""Where the bytes of a block lie in an engine's KV cache, as vectors of pieces.

The value of a block in the pool is its bytes of every layer of its group, layers in the order of their numbers, each in
the order in which it lies in memory.  `text` describes that order: values of equal `text` may be exchanged.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

from mooncake.errors import ConfigError
from mooncake.transfer.blocks import BlockShape, BlockVector


class Layout:
    """The shape of blocks in this engine's memory."""

    def __init__(self, caches: Mapping[str, Any], num_blocks: int) -> None:
        """`caches`: layer → tensor with one dimension of `num_blocks`, or a multiple of it (kernel blocks), or several
        such tensors.  Raises ConfigError."""
        pieces: list[tuple[int, int, int]] = []
        parts: list[str] = []
        seen: set[int] = set()
        self.regions: dict[int, int] = {}  # address → bytes of the memory that the layers lie in
        for name, cache in _tensors(caches):
            if cache.data_ptr() in seen:  # layers that share a cache
                continue
            seen.add(cache.data_ptr())
            storage = cache.untyped_storage()
            self.regions[storage.data_ptr()] = storage.nbytes()
            order, offsets, size, stride = _block(name, cache, num_blocks)
            parts.append(f"{name} {cache.dtype} {order}")
            for offset in offsets:
                address = cache.data_ptr() + offset
                if pieces and pieces[-1][0] + pieces[-1][2] == address and pieces[-1][1] == stride:
                    pieces[-1] = (pieces[-1][0], stride, pieces[-1][2] + size)  # a block of all layers is one run
                else:
                    pieces.append((address, stride, size))
        if not pieces:
            raise ConfigError("the model has no KV cache; a connector is of no use to it")
        bases, strides, sizes = zip(*pieces, strict=True)
        self.shape = BlockShape(bases, strides, sizes)
        self.text = "; ".join(parts)

    def of(self, blocks: list[int]) -> BlockVector:
        """These blocks' bytes."""
        return BlockVector(self.shape, blocks)


def _tensors(caches: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """All of them by name; a layer that keeps its state in several has a name for each."""
    found = []
    for name in sorted(caches, key=_by_number):
        cache = caches[name]
        if isinstance(cache, list | tuple):
            found += [(f"{name}#{i}", each) for i, each in enumerate(cache)]
        else:
            found.append((name, cache))
    return found


def _by_number(name: str) -> list[tuple[int, int, str]]:
    """layers.2 before layers.10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _block(name: str, cache: Any, num_blocks: int) -> tuple[str, list[int], int, int]:
    """(order of its dimensions, offsets of its contiguous runs, bytes of one run, bytes from block to block)."""
    shape, strides, unit = list(cache.shape), list(cache.stride()), cache.element_size()
    axis = next((i for i in range(min(2, len(shape))) if shape[i] and shape[i] % num_blocks == 0), None)
    if axis is None:
        raise ConfigError(
            f"layer {name} has a KV cache of shape {tuple(shape)}, in which {num_blocks} blocks are not found"
        )
    kernel_blocks = shape[axis] // num_blocks
    inner = [(strides[i], shape[i], f"d{i}") for i in range(len(shape)) if i != axis and shape[i] > 1]
    if kernel_blocks > 1:
        inner.append((strides[axis], kernel_blocks, "kernel"))
    inner.sort(reverse=True)
    order = " ".join(f"{dimension}={size}" for _, size, dimension in inner)
    run = 1
    while inner and inner[-1][0] == run:
        run *= inner.pop()[1]
    outer = [[i * stride * unit for i in range(size)] for stride, size, _ in inner]
    offsets = [sum(each) for each in itertools.product(*outer)]
    return order, offsets, run * unit, strides[axis] * kernel_blocks * unit
