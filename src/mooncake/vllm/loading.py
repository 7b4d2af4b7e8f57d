"""What requests are loading: blocks of all groups up to a place, and what is left of it when some did not come."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mooncake.vllm.blocks import Blocks
from mooncake.vllm.groups import Group, Groups


class Load(NamedTuple):
    """`start` and `end`: tokens.  `units`: the hashes of all units between.  `blocks`: by group, with the number in the
    request of the first of each in `firsts`.  `tables`: vLLM's own lists of the request's blocks, by group."""

    start: int
    end: int
    units: list[bytes]
    blocks: list[Blocks]
    firsts: list[int]
    tables: Sequence[list[Any]]


def plan_load(
    groups: Groups, start: int, end: int, hashes: list[bytes], adapter: str, ids: Sequence[list[int]], tables: Any
) -> Load:
    """`hashes`: of grains from token `start` on; `ids`: the request's block tables."""
    blocks, firsts = [], []
    for group, table in zip(groups.all, ids, strict=True):
        size = group.block_size
        needed = range(max(group.first_needed(end), start // size), end // size)
        blocks.append(
            Blocks(
                group.number, adapter, hashes[groups.grains_of(group, start, needed)], table[needed.start : needed.stop]
            )
        )
        firsts.append(needed.start)
    each = groups.unit // groups.grain
    return Load(start, end, hashes[each - 1 : (end - start) // groups.grain : each], blocks, firsts, tables)


def whole_until(groups: Groups, load: Load, missing: set[int]) -> int | None:
    """The last place, in tokens, at which the request can go on in the blocks that it has; None: at none.

    `missing`: which of the load's blocks, counted through, did not come.  A shorter prefix may need blocks of a window
    that vLLM never gave, because those of the longer one begin later.
    """
    lost = dict(_lost(load, missing))
    for place in range(load.end - groups.unit, load.start - 1, -groups.unit):
        if place and all(_has(group, load, lost.get(group.number, ()), place) for group in groups.all):
            return place
    return None


def first_lost(groups: Groups, load: Load, missing: set[int]) -> int:
    """The first token whose block did not come."""
    return min(blocks[0] * groups.all[group].block_size for group, blocks in _lost(load, missing))


def _lost(load: Load, missing: set[int]) -> Iterator[tuple[int, list[int]]]:
    """(group, numbers of its blocks that did not come)."""
    at = 0
    for blocks, first in zip(load.blocks, load.firsts, strict=True):
        count = len(blocks.ids)
        lost = [first + i for i in range(count) if at + i in missing]
        at += count
        if lost:
            yield blocks.group, lost


def _has(group: Group, load: Load, lost: Sequence[int], place: int) -> bool:
    needed = range(group.first_needed(place), place // group.block_size)
    if any(block in needed for block in lost):
        return False
    table = load.tables[group.number]
    return not group.span or not any(table[block].is_null for block in needed)
