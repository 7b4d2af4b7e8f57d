"""Blocks of an engine's KV cache as one vector, which stays small however many pieces there are.

An engine's block lies in pieces: one a layer, or more.  A long prompt has a hundred thousand of them, and arrays of
that many addresses cost a thread milliseconds, and many turns of the interpreter lock beside a busy one (numpy gives it
up for arrays of over 500 items).  So a `BlockVector` is the numbers of its blocks and the shape that all of them have;
only a GPU's kernel, or who copies host memory, works its addresses out.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from mooncake.transfer.pieces import Int64Array, Pieces


class BlockShape:
    """Piece p of block b is `sizes[p]` > 0 bytes at `bases[p] + b * strides[p]`; a block is its pieces in order."""

    def __init__(self, bases: Sequence[int], strides: Sequence[int], sizes: Sequence[int]) -> None:
        self.bases, self.strides, self.sizes = (np.array(each, np.int64) for each in (bases, strides, sizes))
        self.block_bytes = int(self.sizes.sum())

    @cached_property
    def table(self) -> Int64Array:
        """(pieces, 4): base, stride, size, and where the piece begins in its block."""
        return np.stack((self.bases, self.strides, self.sizes, np.cumsum(self.sizes) - self.sizes), axis=1)

    @cached_property
    def grain(self) -> int:
        """The largest power of two that divides all addresses and sizes, at most 4096."""
        return int(np.gcd.reduce(np.append(self.table, 4096), axis=None))

    @cached_property
    def largest(self) -> int:
        return int(self.sizes.max())


class BlockVector(Pieces):
    """Whole blocks, one after another."""

    def __init__(self, shape: BlockShape, blocks: Sequence[int]) -> None:
        self.shape = shape
        self.blocks = blocks

    def of(self, blocks: Sequence[int]) -> "BlockVector":
        """Other blocks of the same shape."""
        return BlockVector(self.shape, blocks)

    def some(self, places: Sequence[int]) -> "BlockVector":
        """Those at different `places` of this vector, in that order; all of them are taken in their own."""
        return self if len(places) == len(self.blocks) else self.of([self.blocks[place] for place in places])

    @cached_property
    def _all(self) -> Pieces:
        addresses = np.array(self.blocks, np.int64)[:, None] * self.shape.strides + self.shape.bases
        return Pieces(addresses.ravel(), np.tile(self.shape.sizes, len(self.blocks)))

    @property
    def addresses(self) -> Int64Array:
        return self._all.addresses

    @property
    def lengths(self) -> Int64Array:
        return self._all.lengths

    @property
    def total(self) -> int:
        return len(self.blocks) * self.shape.block_bytes

    def part(self, start: int, length: int) -> Pieces:
        size = self.shape.block_bytes
        if start % size or length % size:
            return super().part(start, length)
        return self.of(self.blocks[start // size : (start + length) // size])

    def hull(self) -> Pieces:
        """For each piece of a block the range from the first block's to the last one's."""
        shape, low, high = self.shape, min(self.blocks), max(self.blocks)
        return Pieces(shape.bases + low * shape.strides, shape.sizes + (high - low) * shape.strides)
