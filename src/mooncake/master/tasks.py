"""Copy and move tasks: replicas that users want in certain segments.

A task waits, then its room is taken in the target and every part of one replica is copied by the server that owns it,
segment to segment; the master is told how each copy ended.  What can go better later (no room, a busy value, a transfer
that failed) is tried again.  While a task runs, its value can be read, but neither removed nor replaced nor evicted.

    PENDING ──► PROCESSING ──► SUCCESS
       ▲            ├────────► FAILED
       └── retry ◄──┘
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from mooncake.errors import ErrorCode, StoreError
from mooncake.master.catalog import Catalog
from mooncake.master.config import MasterConfig
from mooncake.master.granting import Granting
from mooncake.master.objects import GONE, REPLICATING, Object, PartAt, Replica, in_memory, is_mounted, replicas
from mooncake.master.placement import Item, give_back, place_one
from mooncake.master.pool import Pool, Segment
from mooncake.rpc.task_messages import CopyPart, TaskState

COPY, MOVE = 0, 1  # TaskType
PENDING, PROCESSING, FAILED, SUCCESS = range(4)  # TaskStatus
RETRY_S = 0.1
_STARTED_AT_ONCE = 32
_DONE = "Task completed successfully"


class Task(msgspec.Struct, eq=False):
    """`targets`: names of segments; `source` of a move."""

    number: tuple[int, int]
    type: int
    key: str
    source: str
    targets: list[str]
    created: float  # seconds since the epoch
    client: tuple[int, int]
    since: float  # of its present status, on the directory's clock
    status: int = PENDING
    updated: float = 0.0
    attempts: int = 0
    not_before: float = 0.0
    message: str = ""
    resumed: bool = False  # a former master had begun it, and may have done it
    most_retries: int | None = None  # None: as many as the configuration says


class _Running(msgspec.Struct, eq=False):
    """`copies`: numbers of the copies that have not been reported; `placed`: a replica a target."""

    task: Task
    obj: Object
    source: Replica
    placed: list[Replica]
    copies: set[int]
    code: int = 0


class Tasks:
    """All tasks of this master's life, as far as they are remembered."""

    def __init__(
        self,
        config: MasterConfig,
        pool: Pool,
        catalog: Catalog,
        granting: Granting,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._config = config
        self._pool = pool
        self._catalog = catalog
        self._granting = granting
        self._clock = clock
        self._wall = wall
        self._all: dict[tuple[int, int], Task] = {}
        self._pending: deque[Task] = deque()
        self._running: list[_Running] = []
        self._by_copy: dict[int, _Running] = {}
        self._finished: deque[tuple[int, int]] = deque()
        self._outbox: list[tuple[Segment, CopyPart]] = []

    @property
    def busy(self) -> bool:
        return bool(self._pending or self._running)

    def take_outbox(self) -> Iterator[tuple[Segment, CopyPart]]:
        """What there is to send."""
        outbox, self._outbox = self._outbox, []
        yield from outbox

    # -- what users ask

    def copy(self, key: str, targets: list[str]) -> tuple[int, int]:
        """Have replicas in these segments too; the task.  Raises StoreError."""
        obj = self._value(key)
        if not targets or any(self._named(name) is None for name in targets):
            raise StoreError(ErrorCode.INVALID_PARAMS, "the targets of a copy must be mounted segments")
        if obj is not None and not in_memory(obj):
            raise StoreError(ErrorCode.REPLICA_NOT_FOUND, "the value is only on disk, and only memory is copied")
        self._check_usable(targets)
        return self._add(COPY, key, "", list(dict.fromkeys(targets)), obj)

    def move(self, key: str, source: str, target: str) -> tuple[int, int]:
        """Have a replica in `target` instead of the one in `source`; the task.  Raises StoreError."""
        obj = self._value(key)
        if source == target or self._named(source) is None or self._named(target) is None:
            raise StoreError(ErrorCode.INVALID_PARAMS, "a move goes between two mounted segments")
        if obj is not None and not any(_lies_in(replica, source) for replica in replicas(obj)):
            raise StoreError(ErrorCode.INVALID_PARAMS, f"there is no replica in segment {source}")
        self._check_usable([target])
        return self._add(MOVE, key, source, [target], obj)

    def move_for_drain(self, key: str, source: str, target: str) -> Task:
        """As move, of what is known to be there; tried once."""
        number = self._add(MOVE, key, source, [target], self._catalog.objects.get(key), limited=False)
        task = self._all[number]
        task.most_retries = 0
        return task

    def state(self, number: tuple[int, int], scope: str = "") -> TaskState:
        """Of a task whose key starts with `scope`.  Raises StoreError TASK_NOT_FOUND."""
        task = self._all.get(number)
        if task is None or not task.key.startswith(scope):
            raise StoreError(ErrorCode.TASK_NOT_FOUND, f"no task {number[0]}-{number[1]}")
        created, updated = int(task.created * 1000), int(task.updated * 1000)
        return TaskState(task.type, task.status, created, updated, task.client, task.message)

    def _value(self, key: str) -> Object | None:
        obj = self._catalog.objects.get(key)
        if obj is None and not self._granting.is_open(key):
            raise StoreError(ErrorCode.OBJECT_NOT_FOUND)
        return obj

    def _named(self, name: str) -> Segment | None:
        return next((segment for segment in self._pool.segments.values() if segment.name == name), None)

    def _usable(self, name: str) -> list[Segment]:
        return [segment for segment in self._pool.placeable if segment.name == name]

    def _check_usable(self, targets: list[str]) -> None:
        for name in targets:
            if not self._usable(name):
                raise StoreError(ErrorCode.UNAVAILABLE_IN_CURRENT_STATUS, f"segment {name} takes nothing new now")

    def _add(
        self, kind: int, key: str, source: str, targets: list[str], obj: Object | None, *, limited: bool = True
    ) -> tuple[int, int]:
        if limited and len(self._pending) >= self._config.max_pending_tasks:
            raise StoreError(ErrorCode.TASK_PENDING_LIMIT_EXCEEDED)
        number = (random.getrandbits(63), random.getrandbits(63))
        now = self._wall()
        where = self._source(obj, source) if obj is not None else None
        owner = where[0].segment.client if where else "0-0"
        task = Task(number, kind, key, source, targets, now, _ids(owner), self._clock(), updated=now)
        self._all[number] = task
        self._pending.append(task)
        return number

    # -- from one master to the next

    def all(self) -> list[Task]:
        """Every task that is remembered; those that have ended in the order in which they did."""
        ended = [self._all[number] for number in self._finished]
        return ended + [task for task in self._all.values() if task.status in (PENDING, PROCESSING)]

    def remember(self, tasks: list[Task]) -> None:
        """Tasks of a former master; those that had not ended wait for `resume`."""
        for task in tasks:
            if task.status in (FAILED, SUCCESS):
                self._finished.append(task.number)
            else:
                task.status = PENDING
            task.since, task.resumed = self._clock(), True
            self._all[task.number] = task

    def resume(self) -> None:
        """The segments of the former master are back, as far as they come: begin its tasks again."""
        now = self._clock()
        for task in self._all.values():
            if task.resumed and task.status == PENDING:
                task.since = now
                self._pending.append(task)

    # -- running

    def tick(self, now: float) -> None:
        """Start what is due, give up what takes too long or has lost its segments."""
        for running in list(self._running):
            late = 0 < self._config.processing_task_timeout_s <= now - running.task.since
            if late or not all(map(is_mounted, (running.source, *running.placed))):
                running.code = int(ErrorCode.RPC_TIMEOUT if late else ErrorCode.REPLICA_IS_GONE)
                self._finish(running, now)
        for _ in range(min(len(self._pending), _STARTED_AT_ONCE)):
            task = self._pending.popleft()
            if 0 < self._config.pending_task_timeout_s <= now - task.since:
                self._end(task, FAILED, "the task has waited for too long", now)
            elif now < task.not_before or len(self._running) >= self._config.max_processing_tasks:
                self._pending.append(task)
            else:
                self._start(task, now)

    def _start(self, task: Task, now: float) -> None:
        obj = self._catalog.objects.get(task.key)
        if obj is None:
            self._retry(task, ErrorCode.OBJECT_NOT_FOUND, now)
            return
        if obj.flags & REPLICATING:
            self._retry(task, ErrorCode.OBJECT_HAS_REPLICATION_TASK, now)
            return
        source = self._source(obj, task.source)
        if source is None:
            if task.resumed and all(self._source(obj, name) is not None for name in task.targets):
                self._end(task, SUCCESS, _DONE, now)
            else:
                self._retry(task, ErrorCode.REPLICA_NOT_FOUND, now)
            return
        # (A replica with parts in both segments of a move does not stay.)
        there = [
            replica
            for replica in replicas(obj)
            if is_mounted(replica) and not (task.source and _lies_in(replica, task.source))
        ]
        lacking = [name for name in task.targets if not any(_lies_in(replica, name) for replica in there)]
        size = sum(part.taken for part in source) * len(lacking)
        if task.type == COPY and not self._catalog.has_room(obj, size):
            self._retry(task, ErrorCode.TENANT_QUOTA_EXCEEDED, now)
            return
        placed = self._place(obj, source, lacking)
        if placed is None:
            self._retry(task, ErrorCode.NO_AVAILABLE_HANDLE, now)
            return
        obj.flags |= REPLICATING
        self._catalog.hold(obj)
        self._set(task, PROCESSING, now)
        running = _Running(task, obj, source, placed, set())
        self._running.append(running)
        for replica in placed:
            self._send(running, replica)
        if not running.copies:
            self._finish(running, now)

    def _source(self, obj: Object, name: str) -> Replica | None:
        for replica in replicas(obj):
            if is_mounted(replica) and (not name or _lies_in(replica, name)):
                return replica
        return None

    def _place(self, obj: Object, source: Replica, names: list[str]) -> list[Replica] | None:
        """A replica of the same parts in each of the named segments; None if there is no room in one."""
        group = "" if obj.group is None else obj.group.name
        placed: list[Replica] = []
        for name in names:
            parts: list[PartAt] = []
            for part in source:
                size = sum(part.extents[1::2])
                found = place_one(self._usable(name), Item(obj.key, size, group, _WIDEST_CLIENT), 1)
                if not found or len(found[0]) != 1:
                    give_back([*found, *placed, tuple(parts)])
                    return None
                at = found[0][0]
                parts.append(PartAt(at.segment, at.slots, at.extents, 0))
            seq = self._granting.next_seq()
            placed.append(tuple(PartAt(part.segment, part.slots, part.extents, seq) for part in parts))
        return placed

    def _send(self, running: _Running, replica: Replica) -> None:
        for number, (source, target) in enumerate(zip(running.source, replica, strict=True)):
            copy = self._granting.next_seq()
            running.copies.add(copy)
            self._by_copy[copy] = running
            message = CopyPart(
                copy, source.segment.number, source.slots[0], source.seq or running.obj.seq,
                target.segment.number, target.segment.name, target.segment.info.tcp, self._pool.term,
                list(target.slots), target.seq, list(target.extents), running.obj.seq,
                target.seq & 0x7FFFFFFF, number, len(replica),
            )  # fmt: skip
            self._outbox.append((source.segment, message))

    def reported(self, copy: int, code: int, now: float) -> None:
        """The owner of a source says how a copy ended."""
        running = self._by_copy.pop(copy, None)
        if running is None:
            return
        running.copies.discard(copy)
        running.code = running.code or code
        if not running.copies:
            self._finish(running, now)

    def _finish(self, running: _Running, now: float) -> None:
        task, obj = running.task, running.obj
        self._running.remove(running)
        for copy in running.copies:
            self._by_copy.pop(copy, None)
        obj.flags &= ~REPLICATING
        self._catalog.release(obj, now)
        if obj.flags & GONE:
            running.code = running.code or int(ErrorCode.OBJECT_NOT_FOUND)
        if not all(map(is_mounted, running.placed)):  # the target went away just after the copy was whole
            running.code = running.code or int(ErrorCode.REPLICA_IS_GONE)
        if running.code:
            for replica in running.placed:
                for part in replica:
                    self._pool.kill(part, part.seq, now, clean=False)
            self._retry(task, ErrorCode(running.code), now)
            return
        self._catalog.add_replicas(obj, running.placed, now)
        if task.type == MOVE:
            self._catalog.lose_replicas(obj, lambda _, replica: _lies_in(replica, task.source), now)
        self._end(task, SUCCESS, _DONE, now)

    def _retry(self, task: Task, code: ErrorCode, now: float) -> None:
        task.attempts += 1
        most = self._config.max_task_retries if task.most_retries is None else task.most_retries
        if task.attempts > most:
            self._end(task, FAILED, f"{code.name} (max retries reached: {most})", now)
            return
        task.not_before = now + RETRY_S
        if task.status != PENDING:
            self._set(task, PENDING, now)
        self._pending.append(task)

    def _end(self, task: Task, status: int, message: str, now: float) -> None:
        task.message = message
        self._set(task, status, now)
        self._finished.append(task.number)
        while len(self._finished) > self._config.max_finished_tasks:
            self._all.pop(self._finished.popleft(), None)

    def _set(self, task: Task, status: int, now: float) -> None:
        task.status, task.since, task.updated = status, now, self._wall()


_WIDEST_CLIENT = "-".join(["1" * 20] * 2)  # the record names the value's client, whose id we do not know


def _lies_in(replica: Replica, name: str) -> bool:
    return any(part.segment.name == name for part in replica)


def _ids(client: str) -> tuple[int, int]:
    """ "u64-u64" as numbers."""
    high, _, low = client.partition("-")
    return (int(high), int(low)) if high.isdigit() and low.isdigit() else (0, 0)
