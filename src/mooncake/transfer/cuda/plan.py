"""Pieces of a batch as what the copy engines and the copy kernel take, by numpy alone."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake.transfer.pieces import Int64Array, Pieces

WIDE = 16  # bytes that the fast kernel moves at once; all its addresses and lengths are multiples


class Cuts(NamedTuple):
    """Pieces cut at multiples of a step: addresses, lengths, and where each begins in the whole."""

    addresses: Int64Array
    lengths: Int64Array
    starts: Int64Array

    def firsts(self, step: int, total: int) -> list[int]:
        """Index of the first cut of each step, and the number of cuts at the end."""
        at = np.searchsorted(self.starts, np.arange(0, total, step))
        return [*at.tolist(), len(self.starts)]


def merge(pieces: Pieces) -> Pieces:
    """The same pieces with those that adjoin made one."""
    addresses, lengths = pieces
    if len(lengths) < 2:
        return pieces
    breaks = addresses[1:] != addresses[:-1] + lengths[:-1]
    if breaks.all():
        return pieces
    firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return Pieces(addresses[firsts], np.add.reduceat(lengths, firsts))


def cut(pieces: Pieces, step: int) -> Cuts:
    """Cut at multiples of `step` bytes of the whole."""
    length = int(pieces.lengths[0])
    if step % length == 0 and (pieces.lengths == length).all():
        return Cuts(pieces.addresses, pieces.lengths, np.arange(len(pieces.lengths)) * length)
    ends = np.cumsum(pieces.lengths)
    starts = ends - pieces.lengths
    marks = np.arange(step, int(ends[-1]), step)
    if (starts[np.searchsorted(starts, marks, side="right") - 1] == marks).all():
        return Cuts(pieces.addresses, pieces.lengths, starts)
    return _at(pieces, starts, np.union1d(starts, marks), int(ends[-1]))


def pair(one: Pieces, other: Pieces) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Two vectors of the same total as pairs of equal length: (addresses of one, of the other, lengths)."""
    if len(one.lengths) == len(other.lengths) and (one.lengths == other.lengths).all():
        return one.addresses, other.addresses, one.lengths
    total = one.total
    marks = [np.cumsum(pieces.lengths) - pieces.lengths for pieces in (one, other)]
    both = np.union1d(*marks)
    first, second = (_at(pieces, starts, both, total) for pieces, starts in zip((one, other), marks, strict=True))
    return first.addresses, second.addresses, first.lengths


def descriptors(sources: Int64Array, targets: Int64Array, lengths: Int64Array) -> tuple[npt.NDArray[np.int64], bool]:
    """As the kernel's array of (source, target, length), and whether the wide kernel can take them."""
    table = np.empty((len(lengths), 3), np.int64)
    table[:, 0], table[:, 1], table[:, 2] = sources, targets, lengths
    return table, not (np.bitwise_or.reduce(table, axis=None) & (WIDE - 1))


def _at(pieces: Pieces, starts: Int64Array, marks: Int64Array, total: int) -> Cuts:
    """Cut at `marks` (sorted, beginning with 0, all of `starts` among them)."""
    index = np.searchsorted(starts, marks, side="right") - 1
    lengths = np.diff(marks, append=total)
    return Cuts(pieces.addresses[index] + (marks - starts[index]), lengths, marks)
