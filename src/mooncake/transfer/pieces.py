"""Vectors of ranges of this process's memory, and the copies between them and one contiguous range.

A *piece* is (address, length).  A batch of thousands of pieces is copied by one call that drops the interpreter
lock once: beside a busy thread every return to the interpreter may cost a switch interval (5 ms), so a Python
loop over pieces would take seconds where one call takes milliseconds.

The fast way treats memory as an array of units, as large as divides all offsets and lengths, and lets numpy gather
(`take`) or scatter (item assignment) by index.  It must only see valid addresses.  The careful way asks the kernel to
copy (pwritev/preadv on the segment's descriptor): a bad address is an error there, not a crash.
"""

import ctypes
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake.errors import TransferError

Int64Array = npt.NDArray[np.int64]

MIN_UNIT = 512  # below this an index costs more than it moves
_FEW = 512  # numpy keeps the interpreter lock while it scatters fewer items than this
_IOV_MAX = 1024

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("pwritev", "preadv"):
    getattr(_libc, _name).restype = ctypes.c_ssize_t
    getattr(_libc, _name).argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]


class Pieces:
    """Pieces in order: two arrays of one length."""

    def __init__(self, addresses: Int64Array, lengths: Int64Array) -> None:
        self._addresses, self._lengths = addresses, lengths

    @property
    def addresses(self) -> Int64Array:
        return self._addresses

    @property
    def lengths(self) -> Int64Array:
        return self._lengths

    def __iter__(self) -> Iterator[Int64Array]:
        return iter((self.addresses, self.lengths))

    @property
    def total(self) -> int:
        return int(self.lengths.sum())

    def part(self, start: int, length: int) -> "Pieces":
        """The pieces that make up bytes [start, start + length) of the whole."""
        ends = np.cumsum(self.lengths)
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, start + length, side="left"))
        addresses, lengths = self.addresses[first : last + 1].copy(), self.lengths[first : last + 1].copy()
        if len(lengths):
            cut = start - (int(ends[first]) - int(lengths[0]))
            lengths[-1] -= int(ends[last]) - (start + length)
            addresses[0] += cut
            lengths[0] -= cut
        return Pieces(addresses, lengths)

    def hull(self) -> "Pieces":
        """Ranges that hold all of them, as few as are known."""
        return self


def pieces_of(addresses: Sequence[int], lengths: Sequence[int]) -> Pieces:
    return Pieces(np.array(addresses, np.int64), np.array(lengths, np.int64))


def are_sound(pieces: Pieces) -> bool:
    """Whether these can be pieces of memory at all: no null address, no negative length."""
    return len(pieces.lengths) == 0 or bool(pieces.addresses.min() > 0 and pieces.lengths.min() >= 0)


def flatten(addresses: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]]) -> Pieces:
    """Pieces of lists of lists, without a Python loop over the pieces."""
    pieces = Pieces(_joined(addresses), _joined(lengths))
    if pieces.lengths.all():
        return pieces
    filled = pieces.lengths > 0
    return Pieces(pieces.addresses[filled], pieces.lengths[filled])


def are_equal(lists: Sequence[Sequence[int]]) -> bool:
    """Whether all of them are the same list, as the lengths of an engine's blocks are: much quicker than to look at
    each number."""
    return isinstance(lists, list) and len(lists) > 1 and type(lists[0]) is list and lists.count(lists[0]) == len(lists)


def _joined(lists: Sequence[Sequence[int]]) -> Int64Array:
    if are_equal(lists):
        return np.tile(np.fromiter(lists[0], np.int64, len(lists[0])), len(lists))
    return np.fromiter(chain.from_iterable(lists), np.int64, sum(map(len, lists)))


class _Raw:
    """Memory by address, for numpy.  Costs nothing and owns nothing."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, count: int, unit: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "typestr": f"|V{unit}",
            "version": 3,
        }


def view(address: int, count: int, unit: int) -> npt.NDArray[Any]:
    """`count` units of `unit` opaque bytes at `address`."""
    return np.asarray(_Raw(address, count, unit))


class _Plan(NamedTuple):
    """Pieces as indexes of units from `base`; `span` units are covered by the view."""

    base: int
    span: int
    unit: int
    indexes: Int64Array


def _plan(pieces: Pieces) -> _Plan | None:
    """How numpy can copy these pieces; None if they are too crooked."""
    addresses, lengths = pieces
    base = int(addresses.min())
    offsets = addresses - base
    unit = length = int(lengths[0])
    if not ((lengths == length).all() and not (offsets % length).any()):
        unit = int(np.gcd.reduce(np.concatenate((offsets, lengths))))
        if unit < MIN_UNIT:
            return None
    total = int(lengths.sum())
    while unit % 2 == 0 and unit > MIN_UNIT * 8 and total // unit < _FEW:
        unit //= 2
    index = offsets // unit
    if unit != length or len(lengths) * length != total:
        counts = lengths // unit
        firsts = np.cumsum(counts) - counts
        index = np.repeat(index - firsts, counts) + np.arange(total // unit)
    return _Plan(base, int(index.max()) + 1, unit, index)


def gather(pieces: Pieces, target: int) -> bool:
    """Copy pieces to contiguous memory at `target`.  False if they need the careful way."""
    if len(pieces.addresses) == 1:
        ctypes.memmove(target, int(pieces.addresses[0]), int(pieces.lengths[0]))
        return True
    plan = _plan(pieces)
    if plan is None:
        return False
    out = view(target, len(plan.indexes), plan.unit)
    np.take(view(plan.base, plan.span, plan.unit), plan.indexes, out=out, mode="clip")
    return True


def scatter(source: int, pieces: Pieces) -> bool:
    """Copy contiguous memory at `source` to pieces.  False if they need the careful way."""
    if len(pieces.addresses) == 1:
        ctypes.memmove(int(pieces.addresses[0]), source, int(pieces.lengths[0]))
        return True
    plan = _plan(pieces)
    if plan is None:
        return False
    view(plan.base, plan.span, plan.unit)[plan.indexes] = view(source, len(plan.indexes), plan.unit)
    return True


def write_file(fd: int, offset: int, pieces: Pieces) -> None:
    """Pieces → file.  Raises TransferError for an address that is not readable."""
    _by_kernel(_libc.pwritev, fd, offset, pieces)


def read_file(fd: int, offset: int, pieces: Pieces) -> None:
    """File → pieces.  Raises TransferError for an address that is not writable."""
    _by_kernel(_libc.preadv, fd, offset, pieces)


def _by_kernel(call: Any, fd: int, offset: int, pieces: Pieces) -> None:
    vector = np.empty((len(pieces.addresses), 2), np.int64)
    vector[:, 0], vector[:, 1] = pieces
    ends = np.cumsum(pieces.lengths)
    total, done = int(ends[-1]), 0
    while done < total:
        first = int(np.searchsorted(ends, done, side="right"))
        begun = done - (int(ends[first]) - int(pieces.lengths[first]))  # bytes of it already moved
        vector[first, 0], vector[first, 1] = pieces.addresses[first] + begun, pieces.lengths[first] - begun
        moved = call(fd, vector.ctypes.data + first * 16, min(_IOV_MAX, len(vector) - first), offset + done)
        if moved <= 0:
            if moved == 0:
                raise TransferError("the segment's file ends before the value does: somebody has cut it short")
            reason = ctypes.get_errno()
            raise TransferError(
                f"the kernel could not copy at address {int(vector[first, 0]):#x} (errno {reason}); "
                "the memory given is not mapped, or not with the needed rights"
            )
        done += moved
