"""Forgetting, in steps, what was only in a segment or on a disk that is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mooncake.master.catalog import Catalog
from mooncake.master.objects import GONE, parts
from mooncake.master.pool import Segment


def purge(catalog: Catalog, segment: Segment, clock: Callable[[], float]) -> Iterator[None]:
    """After `segment` was dropped from the pool."""
    catalog.purging += 1
    for some in catalog.objects.slices():
        now = clock()
        for obj in some:
            flat, disk = obj.segment, obj.disk
            if (
                flat is segment
                or (disk is not None and disk.segment is segment)
                or (flat is None and any(part.segment is segment for part in parts(obj)))
            ) and not obj.flags & GONE:
                catalog.lose_segment(obj, segment, now)
        yield
    catalog.purging -= 1
    catalog.unpark(segment, clock())


def purge_disk(catalog: Catalog, segment: Segment, clock: Callable[[], float]) -> Iterator[None]:
    """After the tier of `segment` was lost."""
    catalog.purging += 1
    for some in catalog.objects.slices():
        now = clock()
        for obj in some:
            if obj.disk is not None and obj.disk.segment is segment and not obj.flags & GONE:
                catalog.lose_disk(obj, now)
        yield
    catalog.purging -= 1
