"""Drain jobs: segments that shall be empty, so that their servers can be stopped without a loss.

    CREATED ──► PLANNING ──► RUNNING ──► SUCCEEDED   nothing is left in the segments, not even a reader
                    │            ├─────► FAILED      some values could not leave, or a segment was lost before
                    └────────────┴─────► CANCELED

From the start nothing new is placed in the segments.  Every value there is moved by a task (see `tasks`) to wherever
there is most room; what fits nowhere stays on the disk of a server, if it has one.  Each value is tried a few times.
After FAILED and CANCELED the segments serve as before; after SUCCEEDED they stay out of use until they are unmounted.

The segments' servers remember the job, and tell a new master, where it goes on: with what is left there, so its figures
begin again.  It waits a moment for its other segments.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from mooncake.errors import ErrorCode, StoreError
from mooncake.master.catalog import Catalog
from mooncake.master.counters import Counters
from mooncake.master.objects import REPLICATING, UNWRITABLE, Object, in_memory, on_disk, parts, replicas
from mooncake.master.pool import Pool, Segment
from mooncake.master.puts import Puts
from mooncake.master.tasks import FAILED as TASK_FAILED
from mooncake.master.tasks import SUCCESS as TASK_SUCCESS
from mooncake.master.tasks import Task, Tasks
from mooncake.rpc.segment_messages import Draining

log = logging.getLogger("mooncake.master")

CREATED, PLANNING, RUNNING, SUCCEEDED, FAILED, CANCELED = range(6)
STATES = ("CREATED", "PLANNING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELED")
_TRIES = 3
_PAUSES_S = (0.1, 0.5, 1.0)  # before a value is tried again: eviction may have made room
_LOOK_AGAIN_S = 0.5
_KNOWN_AT_ONCE = 10_000  # values; the garbage collector looks at all that are known while it holds the loop
_REMEMBERED = 1000
_OTHERS_S = 10.0  # for a job's other segments to come back under a new master
_STEPS_AT_ONCE = 32  # values looked at in one step


class _Unit(msgspec.Struct, eq=False, gc=False):
    """One value that has to leave.  `task`: its move; None while it is being written to disk or waits."""

    key: str
    tries: int = 0
    not_before: float = 0.0
    task: Task | None = None
    avoided: list[str] = []
    to_disk: bool = False


class Job(msgspec.Struct, eq=False):
    """`targets`: names of segments, none: all others.  `known`: the keys of `waiting` and `moving`."""

    number: tuple[int, int]
    segments: list[Segment]
    names: list[str]
    targets: list[str]
    most: int
    created: float  # seconds since the epoch
    updated: float
    status: int = CREATED
    message: str = ""
    moved: int = 0
    moved_bytes: int = 0
    on_disk: int = 0
    waiting: deque[_Unit] = msgspec.field(default_factory=deque)
    moving: list[_Unit] = msgspec.field(default_factory=list)
    known: set[str] = msgspec.field(default_factory=set)
    blocked: int = 0  # of those that wait: have been tried in vain
    given_up: dict[str, str] = msgspec.field(default_factory=dict)
    look_at: float = 0.0
    scanning: bool = False
    found: int = 0  # by the last scan, without those given up
    live: int = 1  # bytes of values and of puts that are left
    told: dict[int, object] = msgspec.field(default_factory=dict)  # segments that know of it, by which connection
    note: str = ""
    begins_by: float = 0.0  # though not all of its segments are there

    @property
    def ended(self) -> bool:
        return self.status >= SUCCEEDED


class Drains:
    """All jobs of this master's life, as far as they are remembered."""

    def __init__(
        self,
        counters: Counters,
        pool: Pool,
        catalog: Catalog,
        puts: Puts,
        tasks: Tasks,
        background: deque[Iterator[None]],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._counters = counters
        self._pool = pool
        self._catalog = catalog
        self._puts = puts
        self._tasks = tasks
        self._background = background
        self._clock = clock
        self._wall = wall
        self._jobs: dict[tuple[int, int], Job] = {}
        self._active: list[Job] = []

    @property
    def busy(self) -> bool:
        return bool(self._active)

    @property
    def running(self) -> int:
        return len(self._active)

    # -- what users ask

    def create(self, names: list[str], targets: list[str], most: int) -> Job:
        """Empty the segments of these names.  Raises StoreError INVALID_PARAMS, SEGMENT_NOT_FOUND,
        UNAVAILABLE_IN_CURRENT_STATUS."""
        names, targets = list(dict.fromkeys(names)), list(dict.fromkeys(targets))
        if not names or not 0 < most <= 256:
            raise StoreError(
                ErrorCode.INVALID_PARAMS, "expected one segment at least, and a max_concurrency of 1 to 256"
            )
        if both := set(names) & set(targets):
            raise StoreError(ErrorCode.INVALID_PARAMS, f"segment {min(both)} cannot be drained into itself")
        mounted = {segment.name for segment in self._pool.segments.values()}
        if unknown := [name for name in (*names, *targets) if name not in mounted]:
            raise StoreError(ErrorCode.SEGMENT_NOT_FOUND, f"no segment {unknown[0][:200]} is mounted")
        segments = [segment for segment in self._pool.segments.values() if segment.name in names]
        if any(segment.draining or not segment.filled for segment in segments):
            raise StoreError(
                ErrorCode.UNAVAILABLE_IN_CURRENT_STATUS, "a segment is being drained already, or still being mounted"
            )
        if any(segment.draining for segment in self._pool.segments.values() if segment.name in targets):
            raise StoreError(ErrorCode.UNAVAILABLE_IN_CURRENT_STATUS, "a target takes nothing new now")
        now = self._wall()
        job = Job((random.getrandbits(63), random.getrandbits(63)), segments, names, targets, most, now, now)
        for segment in segments:
            segment.draining = True
        self._pool.refresh(self._clock())
        self._add(job)
        log.info("action=drain_segment, segment_name=%s, job_id=%d-%d", ",".join(names), *job.number)
        return job

    def resume(self, segment: Segment, known: Draining) -> None:
        """The server of `segment` was told of a job, perhaps by an earlier master."""
        job = self._jobs.get(known.job)
        if job is None and 0 < known.most <= 256 and segment.name in known.names and not segment.draining:
            now = self._wall()
            job = Job(known.job, [], known.names, known.targets, known.most, known.created, now)
            job.message = job.note = "it was begun under an earlier master"
            job.begins_by = self._clock() + _OTHERS_S
            self._add(job)
            log.info("action=drain_resumed, segment_name=%s, job_id=%d-%d", segment.name, *job.number)
        if job is None or job.status in (FAILED, CANCELED):
            _tell(segment, None)
        elif segment not in job.segments and not segment.drained:
            if job.ended:
                self._active.append(job)
            job.segments.append(segment)
            self._set(job, CREATED)
            segment.draining = True
            self._pool.refresh(self._clock())

    def _add(self, job: Job) -> None:
        self._jobs[job.number] = job
        self._active.append(job)
        while len(self._jobs) > _REMEMBERED and (old := next((j for j in self._jobs.values() if j.ended), None)):
            del self._jobs[old.number]

    def job(self, number: tuple[int, int]) -> Job:
        """Raises StoreError JOB_NOT_FOUND."""
        job = self._jobs.get(number)
        if job is None:
            raise StoreError(ErrorCode.JOB_NOT_FOUND)
        return job

    def cancel(self, number: tuple[int, int]) -> Job:
        """The segments serve again; moves under way go on to their end.  Raises StoreError JOB_NOT_FOUND,
        UNAVAILABLE_IN_CURRENT_STATUS."""
        job = self.job(number)
        if job.ended:
            raise StoreError(ErrorCode.UNAVAILABLE_IN_CURRENT_STATUS, f"the job has ended: {STATES[job.status]}")
        self._end(job, CANCELED, "")
        return job

    # -- running

    def tick(self, now: float) -> None:
        """Go on with every job."""
        for job in list(self._active):
            self._tell_servers(job)
            if job.status == CREATED:
                if not job.scanning and self._may_begin(job, now):
                    self._set(job, PLANNING)
                    self._look(job)
            elif lost := [segment for segment in job.segments if not segment.mounted]:
                self._lost(job, lost)
            elif not job.scanning:
                self._go_on(job, now)

    def _may_begin(self, job: Job, now: float) -> bool:
        """Whether all that lies in its segments is known, and none of them is still to come."""
        if not all(segment.filled for segment in job.segments if segment.mounted):
            return False
        return now >= job.begins_by or {segment.name for segment in job.segments} >= set(job.names)

    def _tell_servers(self, job: Job) -> None:
        for segment in job.segments:
            if segment.send is not None and job.told.get(segment.number) is not segment.send:
                job.told[segment.number] = segment.send
                _tell(segment, job)

    def _look(self, job: Job) -> None:
        job.scanning = True
        self._background.append(self._scan(job))

    def _scan(self, job: Job) -> Iterator[None]:
        """Find values that are there, in steps: all of them, or as many as shall be known at once."""
        gone, found = set(job.segments), 0
        for some in self._catalog.objects.slices():
            for obj in some:
                if len(job.known) >= _KNOWN_AT_ONCE:
                    break
                flat = obj.segment
                there = flat in gone or (flat is None and any(part.segment in gone for part in parts(obj)))
                if there and obj.key not in job.known and obj.key not in job.given_up:
                    found += 1
                    job.known.add(obj.key)
                    job.waiting.append(_Unit(obj.key, avoided=[]))
            if job.ended:
                return
            if len(job.known) >= _KNOWN_AT_ONCE:
                break
            yield
        job.found = found
        job.scanning = False
        job.look_at = self._clock() + (0.0 if len(job.known) >= _KNOWN_AT_ONCE else _LOOK_AGAIN_S)
        if job.status == PLANNING:
            self._set(job, RUNNING)

    def _go_on(self, job: Job, now: float) -> None:
        self._harvest(job, now)
        for _ in range(min(len(job.waiting), _STEPS_AT_ONCE)):
            if len(job.moving) >= job.most:
                break
            unit = job.waiting.popleft()
            if now < unit.not_before:
                job.waiting.append(unit)
            else:
                job.blocked -= bool(unit.tries)
                self._begin(job, unit, now)
        job.live = sum(segment.allocator.used - segment.quarantined for segment in job.segments)
        if job.known:
            return
        if not any(segment.allocator.used for segment in job.segments):
            self._end(job, SUCCEEDED, _only_on_disk(job))
        elif not job.live:
            job.message = "waiting for the last readers"
        elif now < job.look_at:
            return
        elif job.found or not job.given_up or self._has_open_puts(job):
            self._look(job)
        else:
            some = next(iter(job.given_up.items()))
            self._end(job, FAILED, f"{len(job.given_up)} values could not leave, such as {some[0][:100]!r}: {some[1]}")

    def _has_open_puts(self, job: Job) -> bool:
        return any(part.segment in job.segments for put in self._puts.by_seq.values() for part in parts(put.obj))

    def _begin(self, job: Job, unit: _Unit, now: float) -> None:
        """Start what brings `unit` out of the segments; it is no longer waiting."""
        obj = self._catalog.objects.get(unit.key)
        source = None if obj is None else _source(obj, job.segments)
        if obj is None or source is None:  # it was removed, or its replica has left another way
            job.known.discard(unit.key)
        elif obj.flags & REPLICATING or source.suspect:
            self._wait(job, unit, now + _PAUSES_S[0])
        elif unit.to_disk:
            self._write(job, unit, obj, now)
        elif (target := self._target(job, unit, obj, source)) is not None:
            unit.avoided.append(target)
            unit.task = self._tasks.move_for_drain(unit.key, source.name, target)
            job.moving.append(unit)
        else:
            self._failed(job, unit, obj, "there is no room in other segments", now)

    def _target(self, job: Job, unit: _Unit, obj: Object, source: Segment) -> str | None:
        """Where there is most room, of the segments that were not tried; one that has a replica already only if no
        other will do."""
        moved = next(replica for replica in replicas(obj) if any(part.segment is source for part in replica))
        size = sum(part.taken for part in moved)
        stay = [replica for replica in replicas(obj) if all(part.segment.name != source.name for part in replica)]
        holds = {part.segment.name for replica in stay for part in replica}
        best: tuple[bool, int, str] | None = None
        for segment in self._pool.placeable:
            name = segment.name
            if name in job.names or name in unit.avoided or (job.targets and name not in job.targets):
                continue
            if name in holds or segment.allocator.free >= size:
                best = max(best or (False, 0, ""), (name not in holds, segment.allocator.free, name))
        return None if best is None else best[2]

    def _write(self, job: Job, unit: _Unit, obj: Object, now: float) -> None:
        """It fits nowhere in memory: have it on disk, and let it leave memory when it is there."""
        if on_disk(obj):
            job.on_disk += 1
            self._catalog.leave_memory(obj, now)
            job.known.discard(unit.key)
        elif obj.flags & UNWRITABLE or not self._catalog.disks.write(obj):
            self._give_up(job, unit, "there is no room in other segments, and no disk that takes it")
        else:
            self._wait(job, unit, now + 0.02)

    def _harvest(self, job: Job, now: float) -> None:
        """What has become of the moves."""
        moving, job.moving = job.moving, []
        for unit in moving:
            task = unit.task
            assert task is not None
            if task.status == TASK_SUCCESS:
                obj = self._catalog.objects.get(unit.key)
                job.moved += 1
                job.moved_bytes += 0 if obj is None else obj.size
                self._counters["mooncake_drain_moved_total"] += 1
                self._counters["mooncake_drain_moved_bytes_total"] += 0 if obj is None else obj.size
                job.updated = self._wall()
                job.known.discard(unit.key)
            elif task.status == TASK_FAILED:
                unit.task = None
                obj = self._catalog.objects.get(unit.key)
                if obj is None:
                    job.known.discard(unit.key)
                else:
                    self._failed(job, unit, obj, task.message, now)
            else:
                job.moving.append(unit)

    def _failed(self, job: Job, unit: _Unit, obj: Object, reason: str, now: float) -> None:
        unit.tries += 1
        if unit.tries < _TRIES:
            unit.avoided = unit.avoided[-1:]
            self._wait(job, unit, now + _PAUSES_S[unit.tries - 1])
        elif any(part.segment.tier is not None for part in parts(obj)) or on_disk(obj):
            unit.to_disk = True
            self._wait(job, unit, now)
        else:
            self._give_up(job, unit, reason)

    def _give_up(self, job: Job, unit: _Unit, reason: str) -> None:
        job.given_up[unit.key] = reason
        job.known.discard(unit.key)
        self._counters["mooncake_drain_failed_total"] += 1

    def _wait(self, job: Job, unit: _Unit, when: float) -> None:
        job.blocked += bool(unit.tries)
        unit.not_before = when
        job.waiting.append(unit)

    # -- the end

    def _lost(self, job: Job, lost: list[Segment]) -> None:
        """Segments went away before the job had ended: whether anything went with them."""
        if (job.live or job.known) and any(segment.allocator.used for segment in lost):
            names = ", ".join(sorted({segment.name for segment in lost}))
            left = len(job.known) + len(job.given_up)
            self._end(
                job,
                FAILED,
                f"segment {names} was lost before it was seen to be empty; {left} known values had not left it",
            )
            return
        job.segments = [segment for segment in job.segments if segment.mounted]
        if not job.segments:
            self._end(job, SUCCEEDED, _only_on_disk(job))

    def _end(self, job: Job, status: int, message: str) -> None:
        self._set(job, status)
        job.message = "; ".join(filter(None, (job.note, message)))
        self._active.remove(job)
        for segment in job.segments:
            segment.drained = segment.mounted and status == SUCCEEDED
            segment.draining = segment.drained or segment.retiring
            if not segment.drained:
                _tell(segment, None)
        job.segments = []
        job.waiting.clear()
        job.moving.clear()
        job.known.clear()
        job.blocked = 0
        self._pool.refresh(self._clock())
        log.info(
            "action=drain_ended, job_id=%d-%d, status=%s, moved=%d%s",
            *job.number, STATES[status], job.moved, f", {message}" if message else "",
        )  # fmt: skip

    def _set(self, job: Job, status: int) -> None:
        job.status, job.updated = status, self._wall()


def _tell(segment: Segment, job: Job | None) -> None:
    """Have its server remember the job, or forget it."""
    if segment.send is None:
        return  # it asks when it is back
    if job is None:
        segment.send(Draining(segment.number, (0, 0), [], [], 0, 0.0))
    else:
        segment.send(Draining(segment.number, job.number, job.names, job.targets, job.most, job.created))


def _source(obj: Object, segments: list[Segment]) -> Segment | None:
    """The one of `segments` in which `obj` has bytes; None: none."""
    if not in_memory(obj):
        return None
    return next((part.segment for part in parts(obj) if part.segment in segments), None)


def _only_on_disk(job: Job) -> str:
    return f"{job.on_disk} values are only on disk now, for lack of memory" if job.on_disk else ""
