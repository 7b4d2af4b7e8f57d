"""Which messages a connection may send: a segment server speaks of its segments, and a client of keys.

What a segment server says has the keys of all tenants in it, and no tenant is known of it: so it asks for no key.
And among tenants no client may announce values as a segment server does, since it would give them to others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from mooncake.master.handlers import HANDLERS, Handler
from mooncake.rpc import disk_messages as d
from mooncake.rpc import messages as m
from mooncake.rpc import task_messages as t
from mooncake.rpc.messages import KINDS, SEGMENT
from mooncake.rpc.segment_messages import DiskUnmount, Draining, Retire

ROLES = "client", SEGMENT

_ANYBODY = frozenset({KINDS[m.Ping]})
_OF_SEGMENTS = frozenset(
    KINDS[kind]
    for kind in (
        m.Mount, m.Announce, m.AnnouncePlain, m.Heartbeat, m.Unmount, m.Killed, Retire, Draining, t.CopyEnded,
        d.DiskMount, d.DiskAnnounce, d.DiskReport, DiskUnmount,
    )
)  # fmt: skip


@cache
def handlers_of(role: str, among_tenants: bool) -> Mapping[int, Handler]:
    """By kind of message."""
    if role == SEGMENT:
        return {kind: handler for kind, handler in HANDLERS.items() if kind in _OF_SEGMENTS | _ANYBODY}
    if among_tenants:
        return {kind: handler for kind, handler in HANDLERS.items() if kind not in _OF_SEGMENTS}
    return HANDLERS
