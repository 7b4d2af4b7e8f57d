"""What the messages of clients ask of the directory: one handler a message kind (see `handlers`).

Slices of a batch go from its end to its start: what was touched last leaves last, and a batch's first keys shall leave
last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from mooncake.errors import ErrorCode, StoreError
from mooncake.master.damage import drop_damaged
from mooncake.master.granting import Wish
from mooncake.master.handlers import Reply, handles, in_steps
from mooncake.master.limits import check_count
from mooncake.rpc import messages as m
from mooncake.rpc.message import Message
from mooncake.rpc.record_messages import Damaged

if TYPE_CHECKING:
    from mooncake.master.service import Session

EXIST_AT_ONCE = 2000  # 0.1-0.6 us a key
_READ_AT_ONCE = 1000  # 0.5-1 us
_START_AT_ONCE = 256  # 4-8 us
_END_AT_ONCE = 256  # 2-5 us


def from_the_end(count: int, step: int) -> Iterator[slice]:
    for end in range(count, 0, -step):
        yield slice(max(0, end - step), end)


def _name(session: Session) -> str:
    assert session.client is not None
    return session.client.name


def _check_keys(keys: list[str]) -> None:
    check_count(len(keys))


# ---------------------------------------------------------------- reading


@handles(m.Ping)
def _ping(session: Session, _: m.Ping) -> Reply:
    session.service.counters["master_ping_requests_total"] += 1
    return m.Codes([0])


@handles(m.Exist)
def _exist(session: Session, request: m.Exist) -> Reply:
    service, keys = session.service, request.keys
    service.counters.request("exist_key", len(keys), 0)
    if len(keys) > EXIST_AT_ONCE:
        _check_keys(keys)
        return _exist_many(session, keys)
    directory = service.directory
    return m.ExistReply(directory.exist(keys, directory.clock()))


async def _exist_many(session: Session, keys: list[str]) -> Message:
    directory = session.service.directory
    found = bytearray(len(keys))
    for some in from_the_end(len(keys), EXIST_AT_ONCE):
        found[some] = directory.exist(keys[some], directory.clock())
        await asyncio.sleep(0)
    return m.ExistReply(bytes(found))


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
    for some in from_the_end(len(keys), _READ_AT_ONCE):
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
    return m.GetReply(lease, service.config.lease_ms, found, service.directory.term)


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
    for some in from_the_end(len(keys), _READ_AT_ONCE):
        slices.append(directory.query(keys[some], directory.clock()))
        await asyncio.sleep(0)
    return _queried(session, [found for some in reversed(slices) for found in some])


def _queried(session: Session, found: list[int | m.Found]) -> Message:
    service = session.service
    failed = len([answer for answer in found if type(answer) is int])
    service.counters.request("get_replica_list", len(found), failed)
    return m.GetReply(0, service.config.lease_ms, found, service.directory.term)


@handles(Damaged)
def _damaged(session: Session, request: Damaged) -> Reply:
    if not len(request.keys) == len(request.checksums) == len(request.places):
        raise StoreError(ErrorCode.INVALID_PARAMS, "keys, checksums and places differ in length")
    if len(request.keys) > _END_AT_ONCE:
        raise StoreError(ErrorCode.INVALID_PARAMS, f"{len(request.keys)} damaged replicas in one report")
    directory = session.service.directory
    dropped = drop_damaged(
        directory.catalog, session.service.counters, request.keys, request.checksums, request.places, directory.clock()
    )
    session.service.work()
    return m.Codes([0 if gone else int(ErrorCode.REPLICA_NOT_FOUND) for gone in dropped])


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
    return m.PutStarted(session.service.directory.term, answers, session.scope)


@handles(m.PutEnd)
def _put_end(session: Session, request: m.PutEnd) -> Reply:
    if len(request.lost) % 2:
        raise StoreError(ErrorCode.INVALID_PARAMS, "lost replicas come as pairs")
    if request.checksums and len(request.checksums) != len(request.done):
        raise StoreError(ErrorCode.INVALID_PARAMS, f"{len(request.done)} puts but {len(request.checksums)} checksums")
    if len(request.done) + len(request.failed) > _END_AT_ONCE:
        return _put_end_many(session, request)
    codes = _end(session, request.done, request.lost, request.checksums) + _revoke(session, request.failed)
    _count_ends(session, codes, len(request.done))
    return m.Codes(codes)


async def _put_end_many(session: Session, request: m.PutEnd) -> Message:
    done, failed = request.done, request.failed
    codes = [0] * (len(done) + len(failed))
    for some in from_the_end(len(done), _END_AT_ONCE):
        codes[some] = _end(session, done[some], request.lost, request.checksums[some])
        await asyncio.sleep(0)
    for some in from_the_end(len(failed), _END_AT_ONCE):
        codes[len(done) + some.start : len(done) + some.stop] = _revoke(session, failed[some])
        await asyncio.sleep(0)
    _count_ends(session, codes, len(done))
    return m.Codes(codes)


def _end(session: Session, seqs: list[int], lost: list[int], checksums: list[int]) -> list[int]:
    if not seqs:
        return []
    assert session.client is not None
    directory = session.service.directory
    if checksums:
        directory.puts.note_checksums(seqs, checksums, session.client)
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
        steps = service.directory.remove_regex(request.pattern, request.force, session.scope)
    except StoreError:
        service.counters.one("remove_by_regex", failed=1)
        raise
    service.counters.one("remove_by_regex", failed=0)
    return _count(session, steps)


@handles(m.RemoveAll)
def _remove_all(session: Session, request: m.RemoveAll) -> Reply:
    service = session.service
    service.counters.one("remove_all", failed=0)
    return _count(session, service.directory.remove_all(request.force, session.scope))


async def _count(session: Session, steps: Generator[None, None, int]) -> Message:
    return m.Count(await in_steps(steps, session.service.flush))
