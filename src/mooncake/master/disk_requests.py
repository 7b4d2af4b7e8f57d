"""What the messages about values on disk ask of the directory: one handler a message kind (see `handlers`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake.errors import ErrorCode, StoreError
from mooncake.master.handlers import Reply, handles, in_steps
from mooncake.master.pool import Segment
from mooncake.master.segment_requests import mounted, steps_of
from mooncake.rpc import disk_messages as d
from mooncake.rpc.message import Message
from mooncake.rpc.messages import Codes
from mooncake.rpc.segment_messages import DiskUnmount

if TYPE_CHECKING:
    from mooncake.master.service import Session


@handles(d.DiskMount)
def _mount(session: Session, request: d.DiskMount) -> Reply:
    directory, config = session.service.directory, session.service.config
    segment = mounted(session, request.segment)
    resumed = directory.disks.mount(segment, request, directory.clock())
    return d.DiskMounted(resumed, config.disk_quota, config.enable_disk_eviction)


@handles(d.DiskAnnounce)
def _announce(session: Session, request: d.DiskAnnounce) -> Reply:
    return _take_in(session, mounted(session, request.segment), request)


async def _take_in(session: Session, segment: Segment, request: d.DiskAnnounce) -> Message:
    service = session.service
    async with session.in_turn:
        steps = service.directory.disk_recovery.announce(segment, request.records, request.last)
        await in_steps(steps_of(steps), service.flush)
    return Codes([0 if segment.mounted else int(ErrorCode.SEGMENT_NOT_FOUND)])


@handles(DiskUnmount)
def _unmount(session: Session, request: DiskUnmount) -> Reply:
    directory = session.service.directory
    directory.unmount_disk(mounted(session, request.segment), directory.clock())
    session.service.work()
    return Codes([0])


@handles(d.DiskReport)
def _report(session: Session, request: d.DiskReport) -> Reply:
    service = session.service
    segment = mounted(session, request.segment)
    if len(request.written) != len(request.keys) or len(request.evicted) != len(request.evicted_keys):
        raise StoreError(ErrorCode.INVALID_PARAMS, "numbers and keys differ in length")
    if request.evicted:
        service.counters.one("evict_disk_replica", failed=0)
    service.directory.disks.report(segment, request, service.directory.clock())
    service.work()
    return Codes([0])
