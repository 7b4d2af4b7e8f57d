"""Reading fragments of values.  A checksum is of a whole value: one that is to be compared is read as a whole into
memory of our own, and its fragments are copied from there."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mooncake.client.get import GetPipeline, Located, slice_place
from mooncake.client.put import PiecesOf, Trust
from mooncake.client.scratch import Scratch
from mooncake.errors import ErrorCode, TransferError
from mooncake.rpc.messages import Found
from mooncake.transfer.pieces import Pieces, pieces_of

_TOGETHER = 64 << 20  # bytes of whole values in memory at once, or one value


class Fragment(NamedTuple):
    """`size` bytes from `offset` of the value of `key`, to `address`."""

    key: str
    found: Found
    offset: int
    address: int
    size: int


def read_fragments(gets: GetPipeline, fragments: Sequence[Fragment], located: Located, trust: Trust) -> list[int]:
    """A code each; `located` is what all of them were found by."""
    codes = [0] * len(fragments)
    plain: list[int] = []
    whole: dict[str, list[int]] = {}
    for i, fragment in enumerate(fragments):
        if gets.must_be_whole(fragment.found):
            whole.setdefault(fragment.key, []).append(i)
        else:
            plain.append(i)
    if plain:
        some = [fragments[i] for i in plain]
        places = [[slice_place(place, f.offset, f.size) for place in f.found.places] for f in some]
        for i, code in zip(plain, gets.fetch(places, _where(some), located, trust), strict=True):
            codes[i] = code
    batch: dict[str, list[int]] = {}
    held = 0
    for key, indexes in whole.items():
        size = fragments[indexes[0]].found.size
        if batch and held + size > _TOGETHER:
            _read_whole(gets, fragments, batch, located, trust, codes)
            batch, held = {}, 0
        batch[key] = indexes
        held += size
    if batch:
        _read_whole(gets, fragments, batch, located, trust, codes)
    return codes


def _read_whole(
    gets: GetPipeline,
    fragments: Sequence[Fragment],
    by_key: dict[str, list[int]],
    located: Located,
    trust: Trust,
    codes: list[int],
) -> None:
    """The values of `by_key`, and from them the fragments; fills `codes` in."""
    keys = list(by_key)
    founds = [fragments[by_key[key][0]].found for key in keys]
    ends = np.cumsum([found.size for found in founds]).tolist()
    starts = [end - found.size for end, found in zip(ends, founds, strict=True)]
    try:
        scratch = Scratch(ends[-1])
    except (OSError, ValueError, OverflowError):
        for indexes in by_key.values():
            for i in indexes:
                codes[i] = int(ErrorCode.BUFFER_OVERFLOW)
        return
    base = scratch.address
    got = gets.fetch(
        [found.places for found in founds],
        lambda values: pieces_of([base + starts[i] for i in values], [founds[i].size for i in values]),
        located,
        lambda _: True,
        gets.checks_of(keys, founds),
    )
    for key, start, code in zip(keys, starts, got, strict=True):
        for i in by_key[key]:
            codes[i] = code or _copy(scratch, start, fragments[i], trust)


def _copy(scratch: Scratch, start: int, fragment: Fragment, trust: Trust) -> int:
    target = pieces_of([fragment.address], [fragment.size])
    try:
        scratch.room.empty([start + fragment.offset, fragment.size], target, trust(target))
    except TransferError as error:
        return int(error.code)
    return 0


def _where(fragments: Sequence[Fragment]) -> PiecesOf:
    addresses = np.array([fragment.address for fragment in fragments], np.int64)
    lengths = np.array([fragment.size for fragment in fragments], np.int64)
    return lambda values: Pieces(addresses[list(values)], lengths[list(values)])
