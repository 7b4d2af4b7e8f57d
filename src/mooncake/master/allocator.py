"""The extents of one segment: which bytes are taken, and where the next ones go.

What is free lies in `holes`; a freed extent merges with its neighbours at once.  Beside them a bit a granule says what
is taken: it catches a double free or an overlap wherever it comes from, and finds the holes after a recovery.  It is
kept in regions of 4,096 granules as Python ints, so regions that are wholly free or wholly taken cost nothing.

Lengths are rounded up to GRANULE.  Extents of a page or more start on a page (copies between buffers that lie
differently in their pages run at a third [M]) unless no hole allows it.  The next extent goes behind the last one
while there is room, so that values of one batch, and successive batches, adjoin.
"""

from __future__ import annotations

from collections.abc import Iterator

from mooncake.master.holes import Holes, bin_of
from mooncake.transfer.table import GRANULE

PAGE = 4096
_REGION = 4096  # granules
_FULL = (1 << _REGION) - 1
_TRIES = 8  # holes looked at in each bin
_MOST_PIECES = 1 << 16


def _round(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


def _align(start: int, length: int) -> int:
    return -(-start // PAGE) * PAGE if length >= PAGE else start


class Allocator:
    """All methods are O(1) but for the length of what they hand out and the regions of 1 MiB that it touches."""

    __slots__ = ("_behind", "_known", "_taken", "free", "holes", "size")

    def __init__(self, size: int, known: bool = True) -> None:
        """`known` False: a segment with values in it; `reserve` them all, then run `find_holes`."""
        self.size = size // GRANULE * GRANULE
        self.free = self.size
        self._taken = [0] * -(-self.size // (GRANULE * _REGION))
        self.holes = Holes()
        self._behind = 0  # where the last extent ended
        self._known = 0  # holes are known below this
        if known:
            self._known = self.size
            if self.size:
                self.holes.add(0, self.size)

    @property
    def used(self) -> int:
        return self.size - self.free

    # -- take

    def allocate(self, size: int) -> int | None:
        """Offset of one extent, or None if no hole was found that holds it."""
        length = _round(size)
        if length > self.free:
            return None
        hole = self._behind
        start = _align(hole, length)
        if start + length <= hole + self.holes.room(hole):
            return self._take(hole, start, length)
        unaligned = None
        least = bin_of(length)
        found = self.holes.nonempty >> least << least
        while found:
            lowest = found & -found
            found ^= lowest
            for hole, room in self.holes.some(lowest.bit_length() - 1, _TRIES):
                if room >= length:
                    start = _align(hole, length)
                    if start + length <= hole + room:
                        return self._take(hole, start, length)
                    unaligned = hole
        return None if unaligned is None else self._take(unaligned, unaligned, length)

    def allocate_run(self, sizes: list[int]) -> list[int] | None:
        """Offsets of adjoining extents of these sizes, or None if no large hole holds them all."""
        at, starts = 0, []
        for size in sizes:
            length = _round(size)
            at = _align(at, length)
            starts.append(at)
            at += length
        hole = self._hole_for_run(at)
        if hole is None:
            return None
        first = _align(hole, PAGE)
        self._take(hole, first, at)
        end = 0
        for i, start in enumerate(starts):
            if start > end:
                self.release(first + end, start - end)
            end = start + _round(sizes[i])
            starts[i] = first + start
        self._behind = first + at
        return starts

    def allocate_pieces(self, size: int) -> list[int] | None:
        """Flat list offset, length, ... of extents that together hold `size`, the largest holes first; None if
        the bytes lack (or lie in more holes than a record may name)."""
        left = _round(size)
        if left > self.free or self._known < self.size:
            return None
        pieces: list[int] = []
        while left:
            room, hole = max((room, hole) for hole, room in self.holes.some(self._top_bin, _TRIES))
            length = min(left, room)
            start = _align(hole, length)
            if start + length > hole + room:
                start = hole
            pieces += (self._take(hole, start, length), length)
            left -= length
            if left and len(pieces) == 2 * _MOST_PIECES:
                for i in range(0, len(pieces), 2):
                    self.release(pieces[i], pieces[i + 1])
                return None
        return pieces

    @property
    def _top_bin(self) -> int:
        return self.holes.nonempty.bit_length() - 1

    def _hole_for_run(self, total: int) -> int | None:
        hole = self._behind
        if _align(hole, PAGE) + total <= hole + self.holes.room(hole):
            return hole
        if self.holes.nonempty:
            for hole, room in self.holes.some(self._top_bin, _TRIES):
                if _align(hole, PAGE) + total <= hole + room:
                    return hole
        return None

    def _take(self, hole: int, start: int, length: int) -> int:
        rest = hole + self.holes.drop(hole) - start - length
        if start > hole:
            self.holes.add(hole, start - hole)
        if rest:
            self.holes.add(start + length, rest)
        self._mark(start, length)
        self._behind = start + length
        return start

    # -- give back

    def release(self, start: int, size: int) -> None:
        """Free one extent.  Raises ValueError unless all of it was taken."""
        length = _round(size)
        self._unmark(start, length)
        if start < self._known:
            self._give(start, min(length, self._known - start))

    def _give(self, start: int, length: int) -> None:
        holes = self.holes
        left = holes.ending(start)
        if left is not None:
            length += holes.drop(left)
            start = left
        if holes.room(start + length):
            length += holes.drop(start + length)
        holes.add(start, length)

    # -- recover

    def reserve(self, extents: list[int]) -> bool:
        """Take these extents (flat) of a segment whose holes are not known yet; False, and nothing done, if one
        of them is out of range or taken."""
        done: list[tuple[int, int]] = []
        for i in range(0, len(extents), 2):
            start, size = extents[i], extents[i + 1]
            if start >= 0 and size > 0 and start % GRANULE == 0 and start + size <= self.size:
                try:
                    self._mark(start, _round(size))
                except ValueError:
                    pass
                else:
                    done.append((start, _round(size)))
                    continue
            for start, length in done:
                self._unmark(start, length)
            return False
        return True

    def reserve_each(self, starts: list[int], sizes: list[int]) -> list[bool]:
        """As `reserve` of each of these extents.  Those that adjoin, as values of one put do, are taken together."""
        done: list[bool] = []
        first, begin, end = 0, 0, 0
        for i, start in enumerate(starts):
            if start != end:
                done += self._reserve_run(starts[first:i], sizes[first:i], begin, end)
                first, begin, end = i, start, start
            end += -(-sizes[i] // GRANULE) * GRANULE
        return done + self._reserve_run(starts[first:], sizes[first:], begin, end)

    def _reserve_run(self, starts: list[int], sizes: list[int], begin: int, end: int) -> list[bool]:
        if begin < end and begin >= 0 and not begin % GRANULE and end <= self.size:
            try:
                self._mark(begin, end - begin)
                return [True] * len(starts)
            except ValueError:
                pass
        return [self.reserve([start, size]) for start, size in zip(starts, sizes, strict=True)]

    def find_holes(self) -> Iterator[None]:
        """After the last `reserve`: learn the holes, in steps between which extents may be released."""
        for region, taken in enumerate(self._taken):
            base = region * _REGION
            count = min(_REGION, self.size // GRANULE - base)
            free = ((1 << count) - 1) & ~taken
            at = 0
            while free:
                skip = (free & -free).bit_length() - 1
                free >>= skip
                at += skip
                length = ((free + 1) & ~free).bit_length() - 1
                free >>= length
                self._give((base + at) * GRANULE, length * GRANULE)
                at += length
            self._known = (base + count) * GRANULE
            yield

    # -- the bits

    def _mark(self, start: int, length: int) -> None:
        taken, masks = self._taken, _masks(start, length)
        for region, mask in masks:
            if taken[region] & mask:
                raise ValueError(f"extent {start}+{length} is taken already")
        for region, mask in masks:
            taken[region] |= mask
        self.free -= length

    def _unmark(self, start: int, length: int) -> None:
        if start < 0 or length <= 0 or start % GRANULE or start + length > self.size:
            raise ValueError(f"extent {start}+{length} is not one of this segment")
        taken, masks = self._taken, _masks(start, length)
        for region, mask in masks:
            if taken[region] & mask != mask:
                raise ValueError(f"extent {start}+{length} is not taken")
        for region, mask in masks:
            taken[region] ^= mask
        self.free += length


def _masks(start: int, length: int) -> list[tuple[int, int]]:
    """(region, its bits) of a range."""
    count = length // GRANULE
    region, first = divmod(start // GRANULE, _REGION)
    if first + count <= _REGION:
        return [(region, ((1 << count) - 1) << first)]
    masks = [(region, _FULL >> first << first)]
    count -= _REGION - first
    whole, rest = divmod(count, _REGION)
    masks += [(region + 1 + i, _FULL) for i in range(whole)]
    if rest:
        masks.append((region + 1 + whole, (1 << rest) - 1))
    return masks
