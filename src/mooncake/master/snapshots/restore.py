"""A new master begins with the newest whole snapshot.

Before it serves: its term and numbers are above the former master's, and what was dead stays dead.  When the segments
of the former one are back, or their time (client_ttl) is over: the order of eviction, the tasks.  No value is served
for being in a snapshot: values come from the segments' tables alone.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator

import msgspec

from mooncake.master.directory import Directory
from mooncake.master.former import Former
from mooncake.master.granting import SEQ_BITS
from mooncake.master.objects import Unit
from mooncake.master.snapshots import blocks as b
from mooncake.master.snapshots.child import Job, Outcome
from mooncake.master.snapshots.file import DamagedError
from mooncake.master.snapshots.keeper import start_child
from mooncake.master.snapshots.settings import SnapshotSettings
from mooncake.master.tasks import Task

log = logging.getLogger("mooncake.master")

READ_LIMIT_S = 10.0  # so long the start waits for a snapshot at most
_LOOK_S = 0.2
_A_SHARD = 1_000  # values
_RANK_BITS = 34
_AT_ONCE = 1_000
_FOUND_AT_ONCE = 500


class Restored:
    """What a snapshot says.  `segments`: those that were mounted, by number."""

    def __init__(self, raw: bytes) -> None:
        """Raises DamagedError."""
        self.head = b.Head("", "", 0.0, 0, 0, 0)
        self.segments: dict[int, str] = {}
        self.former = Former()
        self.tasks: list[Task] = []
        self.order = array("Q")
        for block in b.blocks(raw):
            self._take(block)

    def _take(self, block: b.AnyBlock) -> None:
        former = self.former
        if isinstance(block, b.Head):
            self.head = block
        elif isinstance(block, b.Mounted):
            self.segments |= block.segments
        elif isinstance(block, b.Floors):
            former.floors += block.floors
        elif isinstance(block, b.DeadKeys):
            _raise(former.seqs, block.keys, block.seqs)
        elif isinstance(block, b.DeadGroups):
            _raise(former.groups, block.groups, block.seqs)
        elif isinstance(block, b.DeadRecords):
            _raise(former.owners.setdefault(block.owner, {}), block.slots, block.seqs)
        elif isinstance(block, b.TaskList):
            self.tasks += block.tasks
        else:
            self.order.frombytes(block.seqs)

    def begin(self, directory: Directory) -> None:
        """Before the master serves."""
        directory.pool.term = max(directory.pool.term, self.head.term + 1)
        directory.granting.skip_to(max(self.head.last_seq, directory.pool.term << SEQ_BITS))
        key_of, former = directory.catalog.key_of, self.former
        former.seqs = {key_of(key): seq for key, seq in former.seqs.items()}
        former.groups = {key_of(group): seq for group, seq in former.groups.items()}
        directory.tombstones.former = former
        directory.tasks.remember(self.tasks)
        self.tasks = []

    async def finish(self, directory: Directory) -> None:
        """When the segments are back, or their time is over."""
        ends = directory.clock() + directory.config.client_ttl_s
        while (away := self._away(directory)) and directory.clock() < ends:
            await asyncio.sleep(_LOOK_S)
        directory.tasks.resume()
        log.info(
            "%d of %d segments of the snapshot are back; it knew %d values, there are %d%s",
            len(self.segments) - len(away), len(self.segments), self.head.values, len(directory.catalog.objects),
            f"; missing: {', '.join(away)}"[:500] if away else "",
        )  # fmt: skip
        order, self.order = self.order, array("Q")
        for _ in leave_in_order(directory, order):
            await asyncio.sleep(0)

    def _away(self, directory: Directory) -> list[str]:
        mounted = directory.pool.segments
        return [name for number, name in self.segments.items() if number not in mounted or not mounted[number].filled]


def _raise(known: dict, names: list, seqs: list[int]) -> None:  # type: ignore[type-arg]
    for name, seq in zip(names, seqs, strict=True):
        if seq > known.get(name, 0):
            known[name] = seq


def leave_in_order(directory: Directory, order: array[int]) -> Iterator[None]:
    """Have the values with these numbers leave first, in this order, unless they were used since; in steps."""
    catalog, count = directory.catalog, len(order)
    shards: list[list[int]] = [[] for _ in range(count // _A_SHARD + 1)]
    units: list[Unit | None] = []
    for first in range(0, count, _AT_ONCE):  # rank and number in one int; a dict of all would hold the loop as it grows
        for rank, seq in enumerate(order[first : first + _AT_ONCE], first):
            shards[seq % len(shards)].append(seq << _RANK_BITS | rank)
        units += [None] * min(_AT_ONCE, count - first)
        yield
    for shard in shards:
        shard.sort()
        yield
    for some in catalog.objects.slices():
        for at in range(0, len(some), _FOUND_AT_ONCE):
            for obj in some[at : at + _FOUND_AT_ONCE]:
                place = _rank(shards[obj.seq % len(shards)], obj.seq)
                if place is not None:
                    units[place] = obj.unit()
            yield
    for end in range(count, 0, -_AT_ONCE):
        for unit in reversed(units[max(0, end - _AT_ONCE) : end]):
            if unit is not None:
                catalog.leave_first(unit)
        yield


def _rank(shard: list[int], seq: int) -> int | None:
    at = bisect_left(shard, (seq + 1) << _RANK_BITS) - 1
    return shard[at] & ((1 << _RANK_BITS) - 1) if at >= 0 and shard[at] >> _RANK_BITS == seq else None


async def restore(directory: Directory, settings: SnapshotSettings) -> Restored | None:
    """Begin with the newest whole snapshot; None, said in the log, if there is none."""
    loop = asyncio.get_running_loop()
    counters = directory.counters
    began = time.monotonic()
    try:
        said = await loop.run_in_executor(None, _ask_child, Job(settings, limit_s=READ_LIMIT_S / 4))
        line, _, raw = said.partition(b"\n")
        outcome = msgspec.json.decode(line, type=Outcome)
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        outcome, raw = Outcome(error=f"the process that reads it failed ({error})"), b""
    for damaged in outcome.damaged:
        counters["mooncake_snapshots_damaged_total"] += 1
        log.error("a snapshot is damaged and not used: %s", damaged)
    if outcome.error:
        counters["mooncake_snapshot_restore_failures_total"] += 1
        log.error("snapshots could not all be read: %s", outcome.error)
    if not outcome.name:
        log.warning("no snapshot to begin with was found; the segments' tables fill the directory all the same")
        return None
    try:
        restored = Restored(raw)
    except DamagedError as error:
        counters["mooncake_snapshot_restore_failures_total"] += 1
        log.error("snapshot %s cannot be used: %s", outcome.name, error)
        return None
    restored.begin(directory)
    counters["mooncake_snapshot_restores_total"] += 1
    log.info(
        "began with snapshot %s, which is %.0f s old, in %.2f s",
        outcome.name, time.time() - restored.head.taken, time.monotonic() - began,
    )  # fmt: skip
    return restored


def _ask_child(job: Job) -> bytes:
    child = start_child(job)
    try:
        return child.communicate(timeout=READ_LIMIT_S)[0]
    except BaseException:
        child.kill()
        child.communicate()
        raise
