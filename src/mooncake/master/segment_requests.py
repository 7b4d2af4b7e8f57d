"""What the messages about segments ask of the directory: one handler a message kind (see `handlers`)."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from mooncake.errors import ErrorCode, StoreError
from mooncake.master.handlers import Reply, handles, in_steps
from mooncake.master.plain import columns_of
from mooncake.master.pool import Segment
from mooncake.rpc import messages as m
from mooncake.rpc.message import Message
from mooncake.rpc.place import parse_address
from mooncake.rpc.segment_messages import Draining, Retire

if TYPE_CHECKING:
    from mooncake.master.service import Session

_KILLED_AT_ONCE = 500  # 3-4 us


@handles(m.SegmentQuery)
def _segment_query(session: Session, request: m.SegmentQuery) -> Reply:
    return m.SegmentList(session.service.directory.segment_infos(request.segments))


@handles(m.Mount)
def _mount(session: Session, request: m.Mount) -> Reply:
    service = session.service
    directory, counters = service.directory, service.counters
    term = directory.term
    try:
        parse_address(request.info.tcp)
    except ValueError as error:
        raise StoreError(ErrorCode.INVALID_PARAMS, f"segment {request.info.name[:200]!r}: {error}") from None
    if service.reign is not None and request.term > term:
        later = f"segment {request.info.name[:200]} was served under the later term {request.term}"
        service.reign.end(later, request.term)
        raise StoreError(ErrorCode.UNAVAILABLE_IN_CURRENT_STATUS, "this master leads no longer")
    rpc = "mount_segment" if request.term == 0 else "remount_segment"
    try:
        segment, resumed = directory.mount(
            request.info, request.term, request.lease_ms, session.send_one_way, directory.clock()
        )
    except StoreError:
        counters.one(rpc, failed=1)
        if directory.term != term:
            service.drop_segment_sessions(but=session)
        raise
    counters.one(rpc, failed=0)
    session.segments[segment.number] = segment
    return m.Mounted(resumed)


@handles(m.Announce)
def _announce(session: Session, request: m.Announce) -> Reply:
    segment = mounted(session, request.segment)
    steps = session.service.directory.announce(segment, request.records, request.last)
    return _take_in(session, segment, steps, request.last)


@handles(m.AnnouncePlain)
def _announce_plain(session: Session, request: m.AnnouncePlain) -> Reply:
    segment = mounted(session, request.segment)
    return _take_in(
        session, segment, session.service.directory.recovery.announce_plain(segment, columns_of(request)), False
    )


async def _take_in(session: Session, segment: Segment, steps: Iterator[None], last: bool) -> Message:
    service = session.service
    async with session.in_turn, service.taking_in:
        await in_steps(steps_of(steps), service.flush)
    if last:
        service.work()
    return m.Codes([0 if segment.mounted else int(ErrorCode.SEGMENT_NOT_FOUND)])


def steps_of(steps: Iterator[None]) -> Generator[None, None, None]:
    """For `in_steps`."""
    yield from steps


@handles(m.Heartbeat)
def _heartbeat(session: Session, request: m.Heartbeat) -> Reply:
    directory = session.service.directory
    now = directory.clock()
    codes = []
    for number in request.segments:
        segment = session.segments.get(number)
        alive = segment is not None and segment.send is session.send_one_way and directory.heartbeat(segment, now)
        codes.append(0 if alive else int(ErrorCode.SEGMENT_NOT_FOUND))
    return m.Codes(codes)


@handles(Retire)
def _retire(session: Session, request: Retire) -> Reply:
    directory = session.service.directory
    directory.retire(mounted(session, request.segment), directory.clock())
    session.service.work()
    return m.Codes([0])


@handles(Draining)
def _draining(session: Session, request: Draining) -> Reply:
    session.service.directory.drains.resume(mounted(session, request.segment), request)
    session.service.hurry()
    return None


@handles(m.Unmount)
def _unmount(session: Session, request: m.Unmount) -> Reply:
    service = session.service
    codes = []
    for number in request.segments:
        segment = session.segments.pop(number, None)
        if segment is None:
            codes.append(int(ErrorCode.SEGMENT_NOT_FOUND))
        else:
            service.directory.unmount(segment, service.directory.clock())
            codes.append(0)
        service.counters.one("unmount_segment", failed=segment is None)
    service.work()
    return m.Codes(codes)


@handles(m.Killed)
def _killed(session: Session, request: m.Killed) -> Reply:
    segment = mounted(session, request.segment)
    if len(request.slots) != len(request.seqs):
        raise StoreError(ErrorCode.INVALID_PARAMS, "slots and seqs differ in length")
    if len(request.slots) > _KILLED_AT_ONCE:
        return _killed_many(session, segment, request)
    session.service.directory.killed(segment, request.slots, request.seqs)
    if session.service.directory.granting.waiting:
        session.service.work()
    return None


async def _killed_many(session: Session, segment: Segment, request: m.Killed) -> None:
    service = session.service
    for at in range(0, len(request.slots), _KILLED_AT_ONCE):
        some = slice(at, at + _KILLED_AT_ONCE)
        service.directory.killed(segment, request.slots[some], request.seqs[some])
        service.work()
        await asyncio.sleep(0)


def mounted(session: Session, number: int) -> Segment:
    """The segment.  Raises StoreError."""
    segment = session.segments.get(number)
    if segment is None or not segment.mounted:
        raise StoreError(ErrorCode.SEGMENT_NOT_FOUND, f"segment {number} is not mounted on this connection")
    return segment
