"""Replicas whose bytes are not what was put, as readers found by the value's checksum: nobody is told of them again."""

from __future__ import annotations

import logging

from mooncake.master.catalog import Catalog
from mooncake.master.counters import Counters
from mooncake.master.objects import Object, checksum_of, in_memory, on_disk, place, replicas

log = logging.getLogger("mooncake.master")


def drop_damaged(
    catalog: Catalog, counters: Counters, keys: list[str], checksums: list[int], places: list[list[int]], now: float
) -> list[bool]:
    """Drop the replica at each place, if it still is one of the value with that checksum; which were."""
    dropped = []
    for key, checksum, at in zip(keys, checksums, places, strict=True):
        obj = catalog.objects.get(key)
        is_same = obj is not None and checksum_of(obj) == checksum != 0
        dropped.append(obj is not None and is_same and bool(at) and _drop(catalog, obj, at, now))
    count = sum(dropped)
    if count:
        counters["mooncake_checksum_mismatches_total"] += count
        first = dropped.index(True)
        at = places[first]
        log.error(
            "%d damaged %s dropped: a reader found other bytes than were put; the first is key %r, %s of segment %#x",
            count,
            "replica is" if count == 1 else "replicas are",
            keys[first][:200],
            "on the disk" if at[0] < 0 else "in the memory",
            abs(at[0]),
        )
    return dropped


def _drop(catalog: Catalog, obj: Object, at: list[int], now: float) -> bool:
    disk = obj.disk
    if disk is not None and at == [-disk.segment.number, disk.seq, obj.size]:
        if not in_memory(obj):
            catalog.forget(obj, now)
            return True
        catalog.disks.drop(disk.segment, disk.seq)
        catalog.disks.detach(obj)
        catalog.changed(obj)
        return True
    found = [place(replica) for replica in replicas(obj)]
    if at not in found:
        return False
    damaged = found.index(at)
    if catalog.lose_replicas(obj, lambda i, _: i == damaged, now):
        catalog.settle(obj.unit(), now)
        catalog.changed(obj)
    elif on_disk(obj):
        catalog.leave_memory(obj, now)
    else:
        catalog.forget(obj, now)
    return True
