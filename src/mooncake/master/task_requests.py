"""What the messages about tasks and single replicas ask of the directory: one handler a message kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake.errors import StoreError
from mooncake.master.handlers import Reply, handles
from mooncake.rpc import task_messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake.master.service import Session


@handles(m.CopyTask)
def _copy(session: Session, request: m.CopyTask) -> Reply:
    tasks = session.service.directory.tasks
    return _created(session, "create_copy_task", lambda: tasks.copy(request.key, request.targets))


@handles(m.MoveTask)
def _move(session: Session, request: m.MoveTask) -> Reply:
    tasks = session.service.directory.tasks
    return _created(session, "create_move_task", lambda: tasks.move(request.key, request.source, request.target))


def _created(session: Session, rpc: str, create: Callable[[], tuple[int, int]]) -> Reply:
    service = session.service
    try:
        task = create()
    except StoreError:
        service.counters.one(rpc, failed=1)
        raise
    service.counters.one(rpc, failed=0)
    service.hurry()
    return m.TaskCreated(task)


@handles(m.QueryTask)
def _query(session: Session, request: m.QueryTask) -> Reply:
    service = session.service
    try:
        state = service.directory.tasks.state(request.task, session.scope)
    except StoreError:
        service.counters.one("query_task", failed=1)
        raise
    service.counters.one("query_task", failed=0)
    return state


@handles(m.CopyEnded)
def _copy_ended(session: Session, request: m.CopyEnded) -> Reply:
    service = session.service
    service.counters.one("update_task", failed=int(request.code != 0))
    directory, now = service.directory, service.directory.clock()
    directory.tasks.reported(request.copy_id, request.code, now)
    if directory.drains.busy:
        directory.move_on(now)  # the next value, without waiting for the clock
    service.flush()
    return None


@handles(m.ReplicaClear)
def _replica_clear(session: Session, request: m.ReplicaClear) -> Reply:
    service = session.service
    assert session.client is not None
    directory = service.directory
    cleared = directory.catalog.clear(request.keys, request.segment, session.client.name, directory.clock())
    service.counters.batch("replica_clear", len(request.keys), len(request.keys) - len(cleared))
    service.flush()
    return m.Cleared([key[len(session.scope) :] for key in cleared])
