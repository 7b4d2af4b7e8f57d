"""The free ranges ("holes") of one segment, by start, by end and by size.

In bins by size, four a power of two, so that finding one costs the same however many there are.  Every map is spread
over shards of 4 MiB of the segment: a dict of half a million holes would hold the loop for 30 ms when it grows, and
a bin gives holes of one neighbourhood first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from mooncake.transfer.table import GRANULE

_SHARD_BITS = 22
_BINS = 4 * 60


def bin_of(length: int) -> int:
    """Number of the bin for holes of `length`: grows with it."""
    count = length // GRANULE
    bits = count.bit_length()
    return count if bits <= 2 else bits << 2 | count >> (bits - 3) & 3


class Holes:
    """`nonempty` has bit i set if bin i holds something."""

    __slots__ = ("_bins", "_ends", "_starts", "nonempty")

    def __init__(self) -> None:
        self._starts: dict[int, dict[int, int]] = {}  # shard → start → length
        self._ends: dict[int, dict[int, int]] = {}  # shard → end → start
        self._bins: list[dict[int, dict[int, None]]] = [{} for _ in range(_BINS)]  # shard → starts
        self.nonempty = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(start, length) of every hole."""
        return chain.from_iterable(shard.items() for shard in self._starts.values())

    def room(self, start: int) -> int:
        """Length of the hole that starts there; 0 if there is none."""
        shard = self._starts.get(start >> _SHARD_BITS)
        return 0 if shard is None else shard.get(start, 0)

    def ending(self, end: int) -> int | None:
        """Start of the hole that ends there."""
        shard = self._ends.get(end >> _SHARD_BITS)
        return None if shard is None else shard.get(end)

    def some(self, number: int, most: int) -> Iterator[tuple[int, int]]:
        """(start, length) of up to `most` holes of a bin."""
        for start in islice(chain.from_iterable(self._bins[number].values()), most):
            yield start, self._starts[start >> _SHARD_BITS][start]

    def add(self, start: int, length: int) -> None:
        end, number = start + length, bin_of(length)
        shard, end_shard, hole_bin = start >> _SHARD_BITS, end >> _SHARD_BITS, self._bins[number]
        if shard in self._starts:
            self._starts[shard][start] = length
        else:
            self._starts[shard] = {start: length}
        if end_shard in self._ends:
            self._ends[end_shard][end] = start
        else:
            self._ends[end_shard] = {end: start}
        if shard in hole_bin:
            hole_bin[shard][start] = None
        else:
            hole_bin[shard] = {start: None}
            self.nonempty |= 1 << number

    def drop(self, start: int) -> int:
        """Forget the hole that starts there; its length."""
        shard = start >> _SHARD_BITS
        starts = self._starts[shard]
        length = starts.pop(start)
        if not starts:
            del self._starts[shard]
        end = start + length
        ends = self._ends[end >> _SHARD_BITS]
        del ends[end]
        if not ends:
            del self._ends[end >> _SHARD_BITS]
        number = bin_of(length)
        hole_bin = self._bins[number]
        del hole_bin[shard][start]
        if not hole_bin[shard]:
            del hole_bin[shard]
            if not hole_bin:
                self.nonempty ^= 1 << number
        return length
