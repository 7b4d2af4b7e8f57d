"""What the directory shows of itself, to admin pages and metrics."""

from __future__ import annotations

from typing import NamedTuple


class SegmentView(NamedTuple):
    """A mounted segment as the admin pages show it; `status`: OK, SUSPECT (connection lost) or FILLING."""

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
    disks: dict[str, int]
