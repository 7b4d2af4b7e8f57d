"""What the directory shows of itself, to admin pages and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mooncake.master.objects import Object, checksum_of, is_mounted, on_disk, place, replicas
from mooncake.rpc.messages import Found

if TYPE_CHECKING:
    from mooncake.master.directory import Directory
    from mooncake.master.pool import Pool, Segment


COMPLETE = 3  # ReplicaStatus


class SegmentView(NamedTuple):
    """A mounted segment as the admin pages show it; `status`: OK, DRAINING, DRAINED, SUSPECT (connection lost)
    or FILLING."""

    name: str
    segment: int
    client: str
    host: str
    endpoint: str
    protocol: str
    size: int
    used: int
    status: str


class Totals(NamedTuple):
    """Figures of the whole pool, bytes where not said otherwise; those of `disks` by their metrics' names."""

    key_count: int
    in_memory: int
    soft_pinned: int
    allocated_bytes: int
    capacity_bytes: int
    quarantined_bytes: int
    read_leases: int
    waiting_puts: int
    open_puts: int
    discarded_bytes: int
    clients: int
    drain_jobs: int
    disks: dict[str, int]


def segment_views(pool: Pool) -> list[SegmentView]:
    """The mounted segments."""
    return [
        SegmentView(
            s.name, s.number, s.client, s.host, s.info.shown, s.info.protocol, s.size, s.allocator.used, _status(s)
        )
        for s in pool.segments.values()
    ]  # fmt: skip


def _status(segment: Segment) -> str:
    if segment.suspect:
        return "SUSPECT"
    if segment.draining:
        return "DRAINED" if segment.drained else "DRAINING"
    return "OK" if segment.filled else "FILLING"


def totals_of(directory: Directory) -> Totals:
    """The figures of this moment."""
    pool, catalog = directory.pool, directory.catalog
    return Totals(
        key_count=len(catalog.objects),
        in_memory=len(catalog.objects) - catalog.only_on_disk,
        soft_pinned=catalog.soft_pinned,
        allocated_bytes=pool.used,
        capacity_bytes=pool.capacity,
        quarantined_bytes=pool.quarantined,
        read_leases=len(catalog.reads),
        waiting_puts=directory.granting.waiting,
        open_puts=len(directory.puts.by_seq),
        discarded_bytes=sum(s.quarantined - s.coming for s in pool.segments.values()),
        clients=len(directory.clients),
        drain_jobs=directory.drains.running,
        disks=catalog.disks.figures(),
    )


def readable(obj: Object) -> bool:
    """Whether something of `obj` is left."""
    return any(is_mounted(replica) for replica in replicas(obj)) or on_disk(obj)


def found_at(obj: Object, *, with_states: bool) -> Found | None:
    """What a reader is told: of the disk only if nothing is sure to be in memory, or all is to be said.  None: nothing
    is left."""
    segment, disk = obj.segment, obj.disk
    doubtful = False
    if segment is not None:
        places = [[segment.number, obj.offset, obj.size]] if segment.mounted else []
        doubtful = segment.suspect
    else:
        places = [place(replica) for replica in obj.replicas if is_mounted(replica)]
    if disk is not None and (with_states or doubtful or not places) and on_disk(obj):
        places.append([-disk.segment.number, disk.seq, obj.size])
    if not places:
        return None
    return Found(obj.size, places, [COMPLETE] * len(places) if with_states else [], checksum_of(obj))
