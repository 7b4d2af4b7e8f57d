"""What each message asks of the directory: one handler a message kind.

A handler gets the session and the message and returns the reply, nothing (one-way), or a coroutine for
the reply when the work is too long for one step of the loop or has to wait.  It checks all it was sent before it
changes anything.  Slices of a batch go from its end to its start: what was touched last leaves last, and a
batch's first keys shall leave last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from mooncake.errors import ErrorCode, StoreError
from mooncake.master.granting import Wish
from mooncake.master.pool import Segment
from mooncake.master.puts import Put
from mooncake.rpc import messages as m
from mooncake.rpc.client import parse_address
from mooncake.rpc.messages import KINDS, Message

if TYPE_CHECKING:
    from mooncake.master.service import Session

Reply = Message | Coroutine[Any, Any, Message | None] | None
Handler = Callable[["Session", Any], Reply]
T = TypeVar("T")

MOST_KEYS = 1_000_000
_EXIST_AT_ONCE = 2000  # 0.1-0.6 us a key
_READ_AT_ONCE = 1000  # 0.5-1 us
_START_AT_ONCE = 256  # 4-8 us
_END_AT_ONCE = 256  # 2-5 us
_KILLED_AT_ONCE = 500  # 3-4 us

HANDLERS: dict[int, Handler] = {}


def handles(message: type[Message]) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS[KINDS[message]] = handler
        return handler

    return register


_PATIENT = frozenset(
    KINDS[kind] for kind in (m.Exist, m.Prefix, m.GetStart, m.Query, m.Remove, m.RemoveAll, m.RemoveRegex)
)


def must_wait_for(session: Session, kind: int, request: Message) -> list[Put]:
    """The eager puts that must end before `request`: their callers may have been told already that they have."""
    directory = session.service.directory
    if kind not in _PATIENT or not directory.puts.eager:
        return []
    return directory.puts.eager_met(getattr(request, "keys", None), directory.clock())


async def when_ended(session: Session, kind: int, request: Message, met: list[Put]) -> Message | None:
    """The reply once the eager puts that `request` met have ended; those that began since are not waited for (else
    steady puts would hold it up for ever)."""
    directory = session.service.directory
    for put in met:
        while directory.puts.still_eager(put, directory.clock()):
            await asyncio.sleep(0.0005)
    reply = HANDLERS[kind](session, request)
    return reply if reply is None or isinstance(reply, Message) else await reply


async def in_steps(steps: Generator[None, None, T], after: Callable[[], None]) -> T:
    """Run `steps` with the loop free between them, `after` each; what it returned."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            after()
            return end.value  # type: ignore[no-any-return]
        after()
        await asyncio.sleep(0)


def _from_the_end(count: int, step: int) -> Iterator[slice]:
    for end in range(count, 0, -step):
        yield slice(max(0, end - step), end)


def _name(session: Session) -> str:
    assert session.client is not None
    return session.client.name


def _check_keys(keys: list[str]) -> None:
    _check_count(len(keys))


def _check_count(count: int) -> None:
    if count > MOST_KEYS:
        raise StoreError(ErrorCode.INVALID_PARAMS, f"{count} keys in one request; at most {MOST_KEYS}")


# ---------------------------------------------------------------- reading


@handles(m.Ping)
def _ping(session: Session, _: m.Ping) -> Reply:
    session.service.counters["master_ping_requests_total"] += 1
    return m.Codes([0])


@handles(m.Exist)
def _exist(session: Session, request: m.Exist) -> Reply:
    service, keys = session.service, request.keys
    service.counters.request("exist_key", len(keys), 0)
    if len(keys) > _EXIST_AT_ONCE:
        _check_keys(keys)
        return _exist_many(session, keys)
    directory = service.directory
    return m.ExistReply(directory.exist(keys, directory.clock()))


async def _exist_many(session: Session, keys: list[str]) -> Message:
    directory = session.service.directory
    found = bytearray(len(keys))
    for some in _from_the_end(len(keys), _EXIST_AT_ONCE):
        found[some] = directory.exist(keys[some], directory.clock())
        await asyncio.sleep(0)
    return m.ExistReply(bytes(found))


@handles(m.Prefix)
def _prefix(session: Session, request: m.Prefix) -> Reply:
    service, heads = session.service, request.heads
    if not heads:
        raise StoreError(ErrorCode.INVALID_PARAMS, "no heads of keys; at least one is needed")
    count = len(heads) * sum(map(len, request.tails))
    service.counters.request("exist_key", count, 0)
    if count > _EXIST_AT_ONCE:
        _check_count(count)
        return _prefix_many(session, request)
    directory = service.directory
    now = directory.clock()
    return m.PrefixReply([directory.prefix(heads, tails, now) for tails in request.tails])


async def _prefix_many(session: Session, request: m.Prefix) -> Message:
    """In slices: first how far the lists reach, then the leases, from the end."""
    directory, heads = session.service.directory, request.heads
    step = max(1, _EXIST_AT_ONCE // len(heads))
    lengths = []
    for tails in request.tails:
        length = 0
        for at in range(0, len(tails), step):
            some = tails[at : at + step]
            reached = directory.prefix(heads, some, directory.clock(), lease=False)
            length += reached
            await asyncio.sleep(0)
            if reached < len(some):
                break
        for part in _from_the_end(length, step):
            directory.prefix(heads, tails[part], directory.clock())
            await asyncio.sleep(0)
        lengths.append(length)
    return m.PrefixReply(lengths)


@handles(m.GetStart)
def _get_start(session: Session, request: m.GetStart) -> Reply:
    keys = request.keys
    if len(keys) > _READ_AT_ONCE:
        _check_keys(keys)
        return _get_many(session, keys)
    directory = session.service.directory
    now = directory.clock()
    lease = directory.begin_read(now, _name(session))
    return _got(session, lease.number, directory.read(keys, lease, now))


async def _get_many(session: Session, keys: list[str]) -> Message:
    directory = session.service.directory
    lease = directory.begin_read(directory.clock(), _name(session))
    slices = []
    for some in _from_the_end(len(keys), _READ_AT_ONCE):
        slices.append(directory.read(keys[some], lease, directory.clock()))
        await asyncio.sleep(0)
    return _got(session, lease.number, [found for some in reversed(slices) for found in some])


def _got(session: Session, lease: int, found: list[int | m.Found]) -> Message:
    service = session.service
    failed = len([answer for answer in found if type(answer) is int])
    if failed == len(found):
        service.directory.end_read([lease], service.directory.clock(), _name(session))
        lease = 0
    service.counters.request("get_replica_list", len(found), failed)
    return m.GetReply(lease, service.config.lease_ms, found)


@handles(m.LeaseReturn)
def _lease_return(session: Session, request: m.LeaseReturn) -> Reply:
    service = session.service
    service.directory.end_read(request.leases, service.directory.clock(), _name(session))
    if service.directory.granting.waiting:
        service.work()
    return None


@handles(m.Query)
def _query(session: Session, request: m.Query) -> Reply:
    if len(request.keys) > _READ_AT_ONCE:
        _check_keys(request.keys)
        return _query_many(session, request.keys)
    directory = session.service.directory
    return _queried(session, directory.query(request.keys, directory.clock()))


async def _query_many(session: Session, keys: list[str]) -> Message:
    directory = session.service.directory
    slices = []
    for some in _from_the_end(len(keys), _READ_AT_ONCE):
        slices.append(directory.query(keys[some], directory.clock()))
        await asyncio.sleep(0)
    return _queried(session, [found for some in reversed(slices) for found in some])


def _queried(session: Session, found: list[int | m.Found]) -> Message:
    service = session.service
    failed = len([answer for answer in found if type(answer) is int])
    service.counters.request("get_replica_list", len(found), failed)
    return m.GetReply(0, service.config.lease_ms, found)


# ---------------------------------------------------------------- writing


@handles(m.PutStart)
def _put_start(session: Session, request: m.PutStart) -> Reply:
    keys, sizes, options = request.keys, request.sizes, request.options
    _check_keys(keys)
    if len(sizes) != len(keys):
        raise StoreError(ErrorCode.INVALID_PARAMS, f"{len(keys)} keys but {len(sizes)} sizes")
    if options is not None and options.groups and len(options.groups) != len(keys):
        raise StoreError(ErrorCode.INVALID_PARAMS, f"{len(keys)} keys but {len(options.groups)} groups")
    if len(keys) > _START_AT_ONCE:
        return _put_start_many(session, request)
    service = session.service
    now = service.directory.clock()
    if options is None and len(keys) == 1:
        assert session.client is not None
        answer = service.directory.granting.grant_one(session.client, keys[0], sizes[0], now, eager=request.eager)
        if answer is not None:
            return _started(session, [answer])
    wish = _wish(session, request, slice(None), now + service.config.put_wait_s)
    service.directory.granting.ask(wish, now)
    if not wish.settled:
        return _when_settled(session, wish)
    if service.directory.granting.busy:
        service.work()
    return _started(session, wish.answers)


async def _when_settled(session: Session, wish: Wish) -> Message:
    await _settled(session, wish)
    return _started(session, wish.answers)


async def _settled(session: Session, wish: Wish) -> None:
    if wish.settled:
        return
    service = session.service
    done = asyncio.get_running_loop().create_future()
    wish.on_settled = lambda: None if done.done() else done.set_result(None)
    service.hurry()
    service.work()
    await done


async def _put_start_many(session: Session, request: m.PutStart) -> Message:
    service = session.service
    directory = service.directory
    deadline = directory.clock() + service.config.put_wait_s
    answers: list[int | m.Grant] = []
    for at in range(0, len(request.keys), _START_AT_ONCE):
        wish = _wish(session, request, slice(at, at + _START_AT_ONCE), deadline)
        directory.granting.ask(wish, directory.clock())
        await _settled(session, wish)
        answers += wish.answers
        service.work()
        await asyncio.sleep(0)
    return _started(session, answers)


def _wish(session: Session, request: m.PutStart, some: slice, deadline: float) -> Wish:
    assert session.client is not None
    options = request.options
    groups = options.groups[some] if options is not None else []
    wish = Wish(session.client, request.keys[some], request.sizes[some], options, groups, deadline)
    wish.eager = request.eager
    return wish


def _started(session: Session, answers: list[int | m.Grant]) -> Message:
    if not session.connected:  # it waited for room, and nobody will hear of what it got
        _revoke(session, [answer.seq for answer in answers if isinstance(answer, m.Grant)])
    failed = len([answer for answer in answers if type(answer) is int])
    session.service.counters.request("put_start", len(answers), failed)
    return m.PutStarted(session.service.directory.term, answers)


@handles(m.PutEnd)
def _put_end(session: Session, request: m.PutEnd) -> Reply:
    if len(request.lost) % 2:
        raise StoreError(ErrorCode.INVALID_PARAMS, "lost replicas come as pairs")
    if len(request.done) + len(request.failed) > _END_AT_ONCE:
        return _put_end_many(session, request)
    codes = _end(session, request.done, request.lost) + _revoke(session, request.failed)
    _count_ends(session, codes, len(request.done))
    return m.Codes(codes)


async def _put_end_many(session: Session, request: m.PutEnd) -> Message:
    done, failed = request.done, request.failed
    codes = [0] * (len(done) + len(failed))
    for some in _from_the_end(len(done), _END_AT_ONCE):
        codes[some] = _end(session, done[some], request.lost)
        await asyncio.sleep(0)
    for some in _from_the_end(len(failed), _END_AT_ONCE):
        codes[len(done) + some.start : len(done) + some.stop] = _revoke(session, failed[some])
        await asyncio.sleep(0)
    _count_ends(session, codes, len(done))
    return m.Codes(codes)


def _end(session: Session, seqs: list[int], lost: list[int]) -> list[int]:
    if not seqs:
        return []
    assert session.client is not None
    directory = session.service.directory
    return directory.end_puts(seqs, directory.lost_replicas(lost), session.client, directory.clock())


def _revoke(session: Session, seqs: list[int]) -> list[int]:
    if not seqs:
        return []
    assert session.client is not None
    directory = session.service.directory
    return directory.revoke_puts(seqs, session.client, directory.clock())


def _count_ends(session: Session, codes: list[int], done: int) -> None:
    counters = session.service.counters
    if done:
        counters.request("put_end", done, done - codes[:done].count(0))
    if len(codes) > done:
        counters.request("put_revoke", len(codes) - done, len(codes) - done - codes[done:].count(0))


# ---------------------------------------------------------------- removing


@handles(m.Remove)
def _remove(session: Session, request: m.Remove) -> Reply:
    if len(request.keys) > _END_AT_ONCE:
        _check_keys(request.keys)
        return _remove_many(session, request)
    directory = session.service.directory
    codes = directory.remove(request.keys, request.force, directory.clock())
    return _removed(session, codes)


async def _remove_many(session: Session, request: m.Remove) -> Message:
    directory = session.service.directory
    codes: list[int] = []
    for at in range(0, len(request.keys), _END_AT_ONCE):
        codes += directory.remove(request.keys[at : at + _END_AT_ONCE], request.force, directory.clock())
        session.service.flush()
        await asyncio.sleep(0)
    return _removed(session, codes)


def _removed(session: Session, codes: list[int]) -> Message:
    session.service.counters.one("remove", failed=len(codes) - codes.count(0))
    return m.Codes(codes)


@handles(m.RemoveRegex)
def _remove_regex(session: Session, request: m.RemoveRegex) -> Reply:
    service = session.service
    try:
        steps = service.directory.remove_regex(request.pattern, request.force)
    except StoreError:
        service.counters.one("remove_by_regex", failed=1)
        raise
    service.counters.one("remove_by_regex", failed=0)
    return _count(session, steps)


@handles(m.RemoveAll)
def _remove_all(session: Session, request: m.RemoveAll) -> Reply:
    service = session.service
    service.counters.one("remove_all", failed=0)
    return _count(session, service.directory.remove_all(request.force))


async def _count(session: Session, steps: Generator[None, None, int]) -> Message:
    return m.Count(await in_steps(steps, session.service.flush))


# ---------------------------------------------------------------- segments


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
    rpc = "mount_segment" if request.term == 0 else "remount_segment"
    try:
        segment, resumed = directory.mount(
            request.info, request.term, request.lease_ms, session.send_kill, directory.clock()
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
    return _take_in(session, _mounted(session, request.segment), request)


async def _take_in(session: Session, segment: Segment, request: m.Announce) -> Message:
    service = session.service
    async with session.in_turn:
        steps = service.directory.announce(segment, request.records, request.last)
        await in_steps(_generator(steps), service.flush)
    if request.last:
        service.work()
    return m.Codes([0 if segment.mounted else int(ErrorCode.SEGMENT_NOT_FOUND)])


def _generator(steps: Iterator[None]) -> Generator[None, None, None]:
    yield from steps


@handles(m.Heartbeat)
def _heartbeat(session: Session, request: m.Heartbeat) -> Reply:
    directory = session.service.directory
    now = directory.clock()
    codes = []
    for number in request.segments:
        segment = session.segments.get(number)
        alive = segment is not None and segment.send is session.send_kill and directory.heartbeat(segment, now)
        codes.append(0 if alive else int(ErrorCode.SEGMENT_NOT_FOUND))
    return m.Codes(codes)


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
    segment = _mounted(session, request.segment)
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


def _mounted(session: Session, number: int) -> Segment:
    segment = session.segments.get(number)
    if segment is None or not segment.mounted:
        raise StoreError(ErrorCode.SEGMENT_NOT_FOUND, f"segment {number} is not mounted on this connection")
    return segment
