"""Which segments a value goes to, and where in them.

First an order of the segments (`order`): preferred names, then the strategy, for a same-node batch one host before the
others.  Then room is taken along that order: a batch as one run in one segment, else key by key; a value in one
extent, else in several of one segment, else in parts over several.  Replicas of a value never share a segment,
and share a host only when no other has room.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec

from mooncake.master.objects import PartAt, Replica, granules
from mooncake.master.pool import Segment
from mooncake.rpc.messages import PutOptions
from mooncake.transfer.table import slots_needed


class Item(msgspec.Struct, gc=False, eq=False):
    """One value to place.  `client` and `group` are only here because the record in the table names them."""

    key: str
    size: int
    group: str
    client: str

    def slots(self, extents: int) -> int:
        return slots_needed(self.key, self.group, self.client, extents)


def order(segments: list[Segment], strategy: str, options: PutOptions | None, host: str, need: int) -> list[Segment]:
    """All `segments`, the best first.  `host` is the client's, `need` the bytes of the whole batch."""
    if len(segments) < 2:
        return segments
    if strategy == "free_ratio_first":
        ranked = sorted(segments, key=lambda segment: -segment.allocator.free / segment.size)
    elif strategy == "ssd_free_ratio_first":
        ranked = sorted(segments, key=lambda segment: -_free_on_disk(segment))
    else:
        start = random.randrange(len(segments))
        ranked = segments[start:] + segments[:start]
    if strategy == "local_first":
        ranked.sort(key=lambda segment: segment.host != host)
    if options is not None and options.same_node:
        first = _one_host(ranked, host, need)
        ranked.sort(key=lambda segment: segment.host != first)
    if options is not None and options.preferred:
        rank = {name: i for i, name in reversed(list(enumerate(options.preferred)))}
        ranked.sort(key=lambda segment: rank.get(segment.name, len(rank)))
    return ranked


def _free_on_disk(segment: Segment) -> float:
    """Share of its server's disk quota that is free; -1 without a disk."""
    tier = segment.tier
    return 1 - tier.used / tier.quota if tier is not None and tier.quota else -1.0


def _one_host(segments: list[Segment], host: str, need: int) -> str:
    """The host that a batch shall be on: the client's if it has room, else the one with the most."""
    free: dict[str, int] = {}
    for segment in segments:
        free[segment.host] = free.get(segment.host, 0) + segment.allocator.free
    return host if free.get(host, 0) >= need else max(free, key=free.__getitem__)


def place_batch(ordered: list[Segment], items: list[Item], copies: int) -> list[tuple[Replica, ...]] | None:
    """Replicas of every item, each copy of the batch as one run in one segment; None if that cannot be had."""
    sizes = [item.size for item in items]
    total = sum(map(granules, sizes))
    placed: list[list[Replica]] = [[] for _ in items]
    used: list[Segment] = []
    for _ in range(min(copies, len(ordered))):
        for segment in _apart(ordered, used):
            if segment.allocator.free >= total:
                run = _place_run(segment, items, sizes)
                if run is not None:
                    for replicas, part in zip(placed, run, strict=True):
                        replicas.append((part,))
                    used.append(segment)
                    break
        else:
            for replicas in placed:
                give_back(replicas)
            return None
    return [tuple(replicas) for replicas in placed] if used else None


def place_one(ordered: list[Segment], item: Item, copies: int) -> tuple[Replica, ...]:
    """As many of `copies` replicas as there is room for; perhaps none."""
    used: list[Segment] = []
    placed: list[Replica] = []
    for _ in range(min(copies, len(ordered))):
        left = _apart(ordered, used)
        replica = _place_whole(left, item) or _place_in_pieces(left, item) or _place_in_parts(left, item)
        if replica is None:
            break
        placed.append(replica)
        used += (part.segment for part in replica)
    return tuple(placed)


def give_back(replicas: Iterable[Replica]) -> None:
    """Undo a placement that nobody was told of."""
    for replica in replicas:
        for part in replica:
            _release(part.segment, part.extents)
            part.segment.slots.give(part.slots)


def _apart(ordered: list[Segment], used: list[Segment]) -> list[Segment]:
    """The segments that no other replica uses, those of other hosts first."""
    if not used:
        return ordered
    hosts = {segment.host for segment in used}
    return sorted((s for s in ordered if s not in used), key=lambda segment: segment.host in hosts)


def _place_run(segment: Segment, items: list[Item], sizes: list[int]) -> list[PartAt] | None:
    starts = segment.allocator.allocate_run(sizes)
    if starts is None:
        return None
    run: list[PartAt] = []
    for i, item in enumerate(items):
        slots = segment.slots.take(item.slots(1))
        if slots is None:
            give_back([(part,) for part in run])
            for start, size in zip(starts[i:], sizes[i:], strict=True):
                segment.allocator.release(start, size)
            return None
        run.append(PartAt(segment, tuple(slots), (starts[i], item.size)))
    return run


def _place_whole(segments: list[Segment], item: Item) -> Replica | None:
    for segment in segments:
        start = segment.allocator.allocate(item.size)
        if start is not None:
            part = _with_slots(segment, item, (start, item.size))
            if part is not None:
                return (part,)
    return None


def _place_in_pieces(segments: list[Segment], item: Item) -> Replica | None:
    for segment in segments:
        part = _pieces(segment, item, item.size)
        if part is not None:
            return (part,)
    return None


def _place_in_parts(segments: list[Segment], item: Item) -> Replica | None:
    """Over several segments, as much as possible in each."""
    if sum(segment.allocator.free for segment in segments) < item.size:
        return None
    parts: list[PartAt] = []
    left = item.size
    for segment in segments:
        length = min(left, segment.allocator.free)
        part = _pieces(segment, item, length) if length else None
        if part is not None:
            parts.append(part)
            left -= length
            if not left:
                return tuple(parts)
    give_back([tuple(parts)])
    return None


def _pieces(segment: Segment, item: Item, length: int) -> PartAt | None:
    pieces = segment.allocator.allocate_pieces(length)
    if pieces is None:
        return None
    pieces[-1] -= sum(pieces[1::2]) - length  # the last one is not full
    return _with_slots(segment, item, tuple(pieces))


def _with_slots(segment: Segment, item: Item, extents: tuple[int, ...]) -> PartAt | None:
    slots = segment.slots.take(item.slots(len(extents) // 2))
    if slots is None:
        _release(segment, extents)
        return None
    return PartAt(segment, tuple(slots), extents)


def _release(segment: Segment, extents: tuple[int, ...]) -> None:
    for i in range(0, len(extents), 2):
        segment.allocator.release(extents[i], extents[i + 1])
