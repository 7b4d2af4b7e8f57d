"""Where the bytes of a block lie in a layer of the KV cache, told so that a peer with another order can find them.

A block of a layer is [heads, tokens, rest]; `Shape` says where each of these is, whatever their order in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mooncake.errors import ConfigError
from mooncake.transfer.pieces import Int64Array
from mooncake.vllm.push.heads import Heads

Axis = tuple[int, int]  # (how many, bytes from one to the next)


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """Of a block; `unit` bytes are contiguous.  `tokens` has two axes where kernels have smaller blocks."""

    dtype: str
    heads: Axis
    tokens: tuple[Axis, ...]
    rest: tuple[Axis, ...]
    unit: int

    @property
    def block_tokens(self) -> int:
        return _size(self.tokens)

    @property
    def bytes_of_token(self) -> int:
        """Of one token of one head."""
        return _size(self.rest) * self.unit

    def offsets(self, heads: Heads) -> Int64Array:
        """Of each unit of these heads (counted from the block's own first), from the block's start: by head, then
        token, then the rest."""
        found = np.arange(heads.first, heads.end, dtype=np.int64) * self.heads[1]
        for size, step in (*self.tokens, *self.rest):
            found = (found[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
        return found


class Layers(msgspec.Struct, frozen=True, array_like=True):
    """Block b of layer `names[i]` begins at bases[i] + b * strides[i] and has the shape shapes[kinds[i]]."""

    names: list[str]
    bases: list[int]
    strides: list[int]
    kinds: list[int]
    shapes: list[Shape]

    @property
    def block_bytes(self) -> list[int]:
        """Of each layer."""
        shapes = [self.shapes[kind] for kind in self.kinds]
        return [shape.heads[0] * shape.block_tokens * shape.bytes_of_token for shape in shapes]

    def ranges(self, blocks: list[int]) -> list[tuple[int, int]]:
        """Addresses [start, end) where these blocks are, of all layers."""
        ids = np.unique(np.array(blocks, np.int64))
        breaks = np.flatnonzero(np.diff(ids) != 1)
        firsts, lasts = ids[np.concatenate(([0], breaks + 1))], ids[np.concatenate((breaks, [len(ids) - 1]))]
        found = []
        for base, stride in zip(self.bases, self.strides, strict=True):
            starts, ends = base + firsts * stride, base + (lasts + 1) * stride
            found += list(zip(starts.tolist(), ends.tolist(), strict=True))
        return found


def layers_of(caches: Mapping[str, Any], num_blocks: int, block_size: int) -> Layers:
    """`caches`: layer → tensor.  Layers that share a cache count once.  Raises ConfigError."""
    found = Layers([], [], [], [], [])
    for name, cache in caches.items():
        if isinstance(cache, list | tuple):
            raise ConfigError(f"layer {name} keeps its state in several tensors (Mamba), which is not supported")
        if cache.data_ptr() in found.bases:
            continue
        shape, stride = _shape(name, cache, num_blocks, block_size)
        if shape not in found.shapes:
            found.shapes.append(shape)
        found.names.append(name)
        found.bases.append(cache.data_ptr())
        found.strides.append(stride)
        found.kinds.append(found.shapes.index(shape))
    if not found.names:
        raise ConfigError("the model has no KV cache; a connector is of no use to it")
    return found


def regions_of(caches: Mapping[str, Any]) -> dict[int, int]:
    """Address → bytes of the memory that they lie in."""
    storages = [cache.untyped_storage() for cache in caches.values()]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _shape(name: str, cache: Any, num_blocks: int, block_size: int) -> tuple[Shape, int]:
    """(its shape, bytes from block to block).

    vLLM 0.32 gives [blocks, heads, tokens, content]; 0.25.1 gives [blocks, 2, tokens, heads, content] with the first
    two in either order, and [blocks, tokens, content] for MLA.
    """
    sizes, steps, unit = list(cache.shape), list(cache.stride()), cache.element_size()
    block = next((i for i in range(min(2, len(sizes))) if sizes[i] and sizes[i] % num_blocks == 0), None)
    axes = {3: (1, None), 4: (2, 1), 5: (2, 3)}.get(len(sizes))
    if block is None or axes is None:
        raise ConfigError(
            f"layer {name} has a KV cache of shape {tuple(sizes)}, in which {num_blocks} blocks of "
            "[heads, tokens, content] are not found"
        )
    token, head = axes
    kernel_blocks = sizes[block] // num_blocks
    if sizes[token] * kernel_blocks != block_size:
        raise ConfigError(
            f"layer {name} has a KV cache of shape {tuple(sizes)}, whose blocks should be of {block_size} tokens"
        )
    rest = [(sizes[i], steps[i] * unit) for i in range(len(sizes)) if i not in (block, token, head)]
    size = unit
    if rest and rest[-1][1] == unit:
        size *= rest.pop()[0]
    tokens = [(sizes[token], steps[token] * unit)]
    if kernel_blocks > 1:
        tokens.insert(0, (kernel_blocks, steps[block] * unit))
    heads = (1, 0) if head is None else (sizes[head], steps[head] * unit)
    shape = Shape(str(cache.dtype), heads, tuple(tokens), tuple(rest), size)
    return shape, steps[block] * kernel_blocks * unit


def _size(axes: Sequence[Axis]) -> int:
    size = 1
    for count, _ in axes:
        size *= count
    return size


def split(offsets: Int64Array, unit: int, smaller: int) -> Int64Array:
    """Of units of `smaller` bytes, which divides `unit`."""
    return (offsets[:, None] + np.arange(0, unit, smaller, dtype=np.int64)).ravel()


def runs(ours: Int64Array, theirs: Int64Array, unit: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Units at `ours` and `theirs` as runs that are contiguous on both sides: (ours, theirs, lengths)."""
    order = np.argsort(ours)
    ours, theirs = ours[order], theirs[order]
    breaks = np.flatnonzero((np.diff(ours) != unit) | (np.diff(theirs) != unit)) + 1
    firsts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((firsts, [len(ours)])))
    return ours[firsts], theirs[firsts], counts * unit


def chunks(start: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """[start, end) in ranges of at most `most`."""
    for at in range(start, end, most):
        yield at, min(at + most, end)
