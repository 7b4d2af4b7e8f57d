"""The addresses that callers give, checked, as the client's vectors of pieces."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mooncake.errors import UnsoundError
from mooncake.transfer.cuda import driver

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient
    from mooncake.client.put import PiecesOf, Trust
    from mooncake.transfer.pieces import Pieces

Lists = Sequence[Sequence[int]]


class Cutting(NamedTuple):
    """How a batch is cut: bytes of the first part; how much larger the next ones may be, each prepared while the one
    before it is copied; bytes and values of the largest."""

    first: int
    growth: float
    largest: int
    most: int


LISTS = Cutting(32 << 20, 1.4, 64 << 20, 1 << 62)


def parts_of(client: "StoreClient", totals: list[int], address: int, cutting: Cutting) -> list[slice]:
    """How a batch is cut so that GPUs copy one part while the master is asked about the next; most are not.  The first
    one is small: nothing goes on while that is begun.  Few are best: beside a busy thread, each may cost it and this
    one several turns of the interpreter lock.  `totals`: bytes of the values; `address`: one of theirs."""
    whole = [slice(0, len(totals))]
    if not driver.is_loaded() or sum(totals) < 2 * cutting.first:
        return whole
    if client.registered.covers_one(address, 1, write=False):
        return whole
    parts, first, held, room = [], 0, 0, cutting.first
    for i, total in enumerate(totals):
        held += total
        if held >= room or i + 1 - first == cutting.most:
            parts.append(slice(first, i + 1))
            first, held, room = i + 1, 0, min(int(cutting.growth * room), cutting.largest)
    if first < len(totals):
        parts.append(slice(first, len(totals)))
    return parts


def parts_of_lists(client: "StoreClient", totals: list[int], addresses: Lists) -> list[slice]:
    if not addresses or not addresses[0]:
        return [slice(0, len(totals))]
    return parts_of(client, totals, addresses[0][0], LISTS)


def totals_of(sizes: Lists) -> list[int]:
    """Bytes of each value."""
    from mooncake.transfer.pieces import are_equal

    return [sum(sizes[0])] * len(sizes) if are_equal(sizes) else list(map(sum, sizes))


def trust_of(client: "StoreClient", checked: bool, write: bool) -> "Trust":
    if checked:
        return lambda _: True
    return lambda pieces: client.covers(pieces, write)


class Vectors:
    """The pieces of a batch; made while the master looks for room or for the values, which takes as long."""

    def __init__(self, addresses: Lists, sizes: Lists) -> None:
        self._addresses, self._sizes = addresses, sizes
        self._whole: Pieces | None = None
        self._is_made = False

    def make(self) -> None:
        if not self._is_made:
            self._is_made = True
            with contextlib.suppress(TypeError, ValueError):  # no numbers: is_sound says so of the value that it is
                self._whole = sound_whole(self._addresses, self._sizes)

    @property
    def whole(self) -> "Pieces | None":
        """All of them, or None if some value must be refused."""
        self.make()
        return self._whole


def pieces_by_value(addresses: Lists, sizes: Lists, vectors: Vectors | None = None) -> "PiecesOf":
    """The pieces of some of the values; `vectors`, if given, has those of all.  That raises UnsoundError if some value
    must be refused."""
    from mooncake.transfer.pieces import flatten

    def pieces_of(values: Sequence[int]) -> "Pieces":
        if vectors is not None and vectors.whole is None:
            raise UnsoundError
        if len(values) == len(addresses):
            return flatten(addresses, sizes) if vectors is None or vectors.whole is None else vectors.whole
        return flatten([addresses[i] for i in values], [sizes[i] for i in values])

    return pieces_of


def sound_whole(addresses: Lists, sizes: Lists) -> "Pieces | None":
    """The pieces of all values, if every one of them has as many addresses as sizes and all of those are
    possible; None if some value must be refused (see `is_sound`)."""
    from mooncake.transfer.pieces import are_sound, flatten

    if list(map(len, addresses)) != list(map(len, sizes)):
        return None
    try:
        whole = flatten(addresses, sizes)
    except OverflowError:
        return None
    return whole if are_sound(whole) else None


def is_sound(addresses: Sequence[int], sizes: Sequence[int]) -> bool:
    """As sound_whole, of one value."""
    return (
        len(addresses) == len(sizes) > 0
        and min(addresses) > 0
        and min(sizes) >= 0
        and max(*addresses, *sizes) < 1 << 63
    )
