"""Collects what a snapshot holds from a directory that goes on working, in slices of about a millisecond.

A snapshot is no picture of one moment: each statement was true when it was taken and stays true (see `former`), and
the order of eviction is one that could have been.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from itertools import islice

from mooncake.master.directory import Directory
from mooncake.master.former import Floor, Former, carry_on
from mooncake.master.objects import Group, Object, Unit
from mooncake.master.snapshots.blocks import (
    Block,
    DeadGroups,
    DeadKeys,
    DeadRecords,
    Floors,
    Head,
    Mounted,
    Order,
    TaskList,
)
from mooncake.version import __version__

_KEYS = 1_000
_SEQS = 10_000
_UNITS = 2_000
_TASKS = 500
_MOST_RECORDS = 200_000  # of one owner that has not confirmed them yet


def collect(directory: Directory, cluster: str) -> Iterator[Block]:
    """All blocks of a snapshot; the loop may run between any two."""
    objects = len(directory.catalog.objects)
    yield Head(cluster, __version__, time.time(), directory.term, directory.granting.last_seq, objects)
    segments = [segment for segment in directory.pool.segments.values() if segment.filled]
    yield Mounted({segment.number: segment.name for segment in segments})
    yield _floors(directory)
    yield from _dead_keys(directory)
    yield from _dead_groups(directory)
    yield from _dead_records(directory)
    tasks = directory.tasks.all()
    for at in range(0, len(tasks), _TASKS):
        yield TaskList(tasks[at : at + _TASKS])
    yield from _order(directory, objects)


def _former(directory: Directory) -> Former:
    return directory.tombstones.former or Former()


def _floors(directory: Directory) -> Floors:
    mounted = set[int]()
    for segment in directory.pool.segments.values():
        if segment.filled:
            mounted.add(segment.number)
        if segment.tier is not None and segment.tier.filled:
            mounted.add(segment.tier.number)
    own = [Floor(directory.tombstones.floor, set())]
    own += [Floor(seq, set(), scope) for scope, seq in directory.tombstones.scopes.items()]
    return Floors(carry_on([*own, *_former(directory).floors], mounted))


def _dead_keys(directory: Directory) -> Iterator[DeadKeys]:
    """If the key is there again, up to its present value at most: a number that was raised by a later master (see
    Tombstones.outbid) says more than is true of segments that are mounted."""
    objects = directory.catalog.objects
    for source in (directory.tombstones.keys, _former(directory).seqs):
        keys, seqs = list(source), list(source.values())
        yield DeadKeys([], [])
        for at in range(0, len(keys), _KEYS):
            some, numbers = keys[at : at + _KEYS], seqs[at : at + _KEYS]
            for i, obj in enumerate(objects.find_many(some)):
                if obj is not None:
                    numbers[i] = min(numbers[i], obj.seq - 1)
            yield DeadKeys(some, numbers)


def _dead_groups(directory: Directory) -> Iterator[DeadGroups]:
    groups = directory.catalog.groups
    for source in (directory.tombstones.groups, _former(directory).groups):
        names, seqs = list(source), list(source.values())
        yield DeadGroups([], [])
        for at in range(0, len(names), _KEYS):
            some, numbers = names[at : at + _KEYS], seqs[at : at + _KEYS]
            for i, name in enumerate(some):
                group = groups.get(name)
                if group is not None:
                    numbers[i] = min([numbers[i], *(obj.seq - 1 for obj in group.members.values())])
            yield DeadGroups(some, numbers)


def _dead_records(directory: Directory) -> Iterator[DeadRecords]:
    tombstones = directory.tombstones
    for owners in (tombstones.undelivered, _former(directory).owners):
        for owner, records in list(owners.items()):
            slots = list(islice(records, _MOST_RECORDS))  # (a dict of them would hold the loop for long)
            yield from _in_parts(owner, slots, list(islice(records.values(), _MOST_RECORDS)))
    for segment in list(directory.pool.segments.values()):
        slots = list(islice(segment.doomed, _MOST_RECORDS))
        yield DeadRecords(segment.number, [], [])
        for at in range(0, len(slots), _KEYS):
            doomed = [(slot, segment.doomed.get(slot)) for slot in slots[at : at + _KEYS]]
            known = {slot: one.seq for slot, one in doomed if one is not None}
            yield DeadRecords(segment.number, list(known), list(known.values()))
        if segment.tier is not None:
            dropping = list(segment.tier.dropping)
            yield from _in_parts(segment.tier.number, dropping, dropping)


def _in_parts(owner: int, slots: list[int], seqs: list[int]) -> Iterator[DeadRecords]:
    yield DeadRecords(owner, [], [])
    for at in range(0, len(slots), _SEQS):
        yield DeadRecords(owner, slots[at : at + _SEQS], seqs[at : at + _SEQS])


def _order(directory: Directory, most: int) -> Iterator[Order]:
    """`most`: units that are touched again and again would come without an end."""
    for units in directory.catalog.order(_UNITS):
        yield Order(array("Q", filter(None, map(_seq, units))).tobytes())
        most -= len(units)
        if most < 0:
            return


def _seq(unit: Unit) -> int:
    """The number of a value of `unit`; 0 if it has none."""
    if isinstance(unit, Group):
        return next((obj.seq for obj in unit.members.values()), 0)
    return unit.seq if isinstance(unit, Object) else 0
