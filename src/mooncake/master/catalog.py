"""The values that can be read: by key, by group, and in the order in which they may leave.

Owns the objects, the groups, both kinds of lease and the eviction order; has the pool take extents back.  Whatever
makes a value disappear (removal, eviction, a newer put, loss of its segments) comes through `forget`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.disks import Disks
from mooncake.master.eviction import EvictionPolicy, Fresh, Lru
from mooncake.master.keymap import KeyMap
from mooncake.master.kv_events import KvEvents
from mooncake.master.leases import ProbeLeases, ReadLease, ReadLeases
from mooncake.master.objects import (
    FRESH,
    GONE,
    HARD_PIN,
    REPLICATING,
    SOFT_PIN,
    UNWRITABLE,
    WRITING,
    Group,
    Object,
    PartAt,
    Replica,
    Unit,
    in_memory,
    is_leased,
    lay,
    on_disk,
    parts,
    replicas,
)
from mooncake.master.pool import Pool, Segment
from mooncake.master.tombstones import Tombstones
from mooncake.rpc.record_messages import Body


class Catalog:
    """All complete values.  `policy` makes an eviction order (see `eviction`)."""

    def __init__(
        self,
        config: MasterConfig,
        counters: Counters,
        pool: Pool,
        tombstones: Tombstones,
        policy: Callable[[], EvictionPolicy] = Lru,
    ) -> None:
        ttl = config.lease_ms / 1000
        self._config = config
        self._counters = counters
        self._pool = pool
        self._tombstones = tombstones
        self.objects = KeyMap()
        self.groups: dict[str, Group] = {}
        self.probes = ProbeLeases(ttl)
        self.reads = ReadLeases(ttl, pool.term << 20)
        self.soft_pinned = 0
        self.only_on_disk = 0
        self.disks = Disks(config, counters, pool, self, tombstones)
        self.newest_seq: Callable[[], int] = int  # of the directory
        self.events: KvEvents | None = None
        self._idle = policy()
        self._fresh = Fresh(policy(), ttl)
        self._soft = policy()  # soft-pinned units: a second pass, if at all
        self._pins: list[tuple[float, int, Object]] = []  # ends of soft pins
        self._pinned_until: dict[str, float] = {}  # those of values that are there, by key
        self._order = count()
        self.purging = 0  # segments whose objects may still be listed though they are lost
        self._ttl = ttl

    # -- coming and going

    def insert(self, obj: Object, group: str, soft_until: float, now: float) -> None:
        """A value became readable.  Its key is not there; `soft_until` 0: no soft pin."""
        self.objects.insert(obj)
        if not in_memory(obj):
            self.only_on_disk += 1
        if group:
            self._join(obj, group)
        if soft_until > now:
            obj.flags |= SOFT_PIN
            self.soft_pinned += 1
            heapq.heappush(self._pins, (soft_until, next(self._order), obj))
            self._pinned_until[obj.key] = soft_until
            if obj.group is not None:
                self._take_out(obj.group)
                obj.group.flags |= SOFT_PIN
                obj.group.soft_until = max(obj.group.soft_until, soft_until)
        unit = obj.unit()
        if unit.flags & SOFT_PIN:
            self.settle(unit, now)
        elif self._may_go(unit, now):
            self._take_out(unit)
            self._fresh.add(unit, now)
        self.changed(obj)

    def changed(self, obj: Object) -> None:
        """`obj`, which is there, may have come to a medium or left one: subscribers are told."""
        if self.events is not None:
            self.events.changed(obj)

    takes_plain = True  # insert_plain may be used; False if something must be asked for each single value

    def insert_plain(self, objects: list[Object], now: float) -> list[int]:
        """As `insert` of each, without group or pin, whose key is not there; the others' indexes (they are deleted)."""
        there = self.objects.insert_missing(objects)
        for i in reversed(there):
            del objects[i]
        self._fresh.add_new(list(objects), now)
        if self.events is not None:
            for obj in objects:
                self.events.changed(obj)
        return there

    def _join(self, obj: Object, name: str) -> None:
        group = self.group(name)
        obj.group = group
        group.members[obj.key] = obj
        if obj.flags & HARD_PIN:
            group.pins += 1

    def group(self, name: str) -> Group:
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = Group(name=name, members={})
        return group

    def close_group(self, group: Group) -> None:
        """Forget the group if nothing is left of it."""
        if not group.members and not group.open:
            self._take_out(group)
            group.lease = 0.0
            self.groups.pop(group.name, None)

    def forget(self, obj: Object, now: float) -> None:
        """Nobody finds `obj` any more; its extents come back when nobody can be reading them."""
        self._tombstones.note(obj.key, obj.seq)
        self._drop(obj, now)

    def lose(self, obj: Object, now: float) -> None:
        """The last copy of `obj` is gone; what is left of its group is of no use either."""
        lost: list[Object] = [obj]
        if obj.group is not None and not (obj.group.readers or obj.group.open or obj.group.pins):
            lost = list(obj.group.members.values())
        for one in lost:
            self._counters["master_evicted_key_count"] += 1
            self._counters["master_evicted_size_bytes"] += one.size
            if one is obj:
                self._drop(one, now)
            else:
                self.forget(one, now)

    def _drop(self, obj: Object, now: float) -> None:
        if self.events is not None:
            self.events.gone(obj)
        self.objects.pop(obj.key)
        if not in_memory(obj):
            self.only_on_disk -= 1
        if obj.disk is not None or obj.flags & WRITING:
            self.disks.forget(obj)
        group = obj.group
        if group is None:
            self._take_out(obj)
        else:
            obj.group = None
            del group.members[obj.key]
            group.readers -= obj.readers
            if obj.flags & HARD_PIN:
                group.pins -= 1
            self.close_group(group)
        if obj.flags & SOFT_PIN:
            self.soft_pinned -= 1
            self._pinned_until.pop(obj.key, None)
        obj.flags |= GONE
        obj.lease = 0.0
        for part in parts(obj):
            if obj.readers:
                self._pool.hide(part, obj.seq)
            else:
                self._pool.kill(part, obj.seq, now, clean=True)

    def lose_replicas(self, obj: Object, lost: Callable[[int, Replica], bool], now: float) -> bool:
        """Drop the replicas for which lost(index, replica).  False: none is left; `obj` is unchanged then."""
        kept: list[Replica] = []
        dropped: list[Replica] = []
        for i, replica in enumerate(replicas(obj)):
            (dropped if lost(i, replica) else kept).append(replica)
        if not kept:
            return False
        self._give_back(obj, [part for replica in dropped for part in replica], now, clean=False)
        lay(obj, tuple(kept))
        return True

    def _give_back(self, obj: Object, lost: list[PartAt], now: float, *, clean: bool) -> None:
        """Take these parts of `obj`, which stays, out of memory."""
        self.disks.lose_parts(obj, lost)
        for part in lost:
            if obj.readers:
                self._pool.kill_after(part, obj.seq, now + self._ttl)
            else:
                self._pool.kill(part, obj.seq, now, clean=clean)

    def add_replicas(self, obj: Object, added: Iterable[Replica], now: float) -> None:
        """`obj`, which is there, has more replicas in memory; perhaps its only ones."""
        more = tuple(added)
        if more and not in_memory(obj):
            self.only_on_disk -= 1
        lay(obj, (*replicas(obj), *more))
        obj.flags &= ~UNWRITABLE  # another server may have a disk that takes it
        self.settle(obj.unit(), now)
        self.changed(obj)

    def clear(self, keys: list[str], segment: str, client: str, now: float) -> list[str]:
        """Drop the replicas in `segment` ("": all) of what `client` wrote and nobody has leased; of which keys."""
        return [key for key in dict.fromkeys(keys) if self._clear(key, segment, client, now)]

    def _clear(self, key: str, segment: str, client: str, now: float) -> bool:
        obj = self.objects.get(key)
        if obj is None or obj.client != client or obj.flags & REPLICATING or is_leased(obj, now):
            return False
        if not segment:
            self.forget(obj, now)
            return True
        there = [any(part.segment.name == segment for part in replica) for replica in replicas(obj)]
        if not any(there):
            return False
        if self.lose_replicas(obj, lambda i, _: there[i], now):
            self.settle(obj.unit(), now)  # it may have waited to be written
        elif on_disk(obj):
            self.leave_memory(obj, now)
        else:
            self.forget(obj, now)
        return True

    def lose_disk(self, obj: Object, now: float) -> None:
        """Its place on disk is lost, for now: it may come back, so there is no tombstone."""
        self.disks.detach(obj)
        if not in_memory(obj):
            self._drop(obj, now)

    def lose_segment(self, obj: Object, segment: Segment, now: float) -> None:
        """What it has in `segment` is lost, likewise."""
        if obj.disk is not None and obj.disk.segment is segment:
            self.disks.detach(obj)
        if self.lose_replicas(obj, lambda _, replica: any(part.segment is segment for part in replica), now):
            self.changed(obj)
        elif on_disk(obj):
            self.leave_memory(obj, now)
        else:
            self._drop(obj, now)

    # -- what a catalog with tenants knows better

    def note_leaving(self, obj: Object, change: int) -> None:
        """So many bytes of `obj` more (or less) leave memory as soon as they are on disk."""

    def has_room(self, obj: Object, size: int) -> bool:
        """Whether `obj` may take `size` bytes of memory more, for its own sake."""
        return True

    def known_as(self, body: Body) -> Body:
        """`body`, as a table or a disk has it, with the key and group that it has here."""
        return body

    def key_of(self, name: str) -> str:
        """The same of a key or group alone."""
        return name

    def takes(self, body: Body) -> bool:
        """Whether a record of an earlier master is one of this master's name spaces."""
        return not body.private

    # -- leases

    def lease_for_reading(self, objects: list[Object], lease: ReadLease, now: float) -> None:
        self.probes.touch(objects, now)
        if lease not in self.reads:  # a long request outlived it: its reader will find that it has run out
            return
        lease.objects += objects
        for obj in objects:
            obj.readers += 1
            if obj.group is not None:
                obj.group.readers += 1

    def end_reading(self, number: int, now: float) -> None:
        """A read lease was handed back or has run out."""
        for obj in self.reads.end(number):
            self.release(obj, now)

    def hold(self, obj: Object) -> None:
        """Keep every byte of `obj` as it is until `release`, whatever happens to the key."""
        obj.readers += 1
        if obj.group is not None:
            obj.group.readers += 1

    def release(self, obj: Object, now: float) -> None:
        """One reader less."""
        obj.readers -= 1
        if obj.group is not None:
            obj.group.readers -= 1
        if not obj.readers:
            if obj.flags & GONE:
                for part in parts(obj):
                    self._pool.kill(part, obj.seq, now, clean=True)
            elif obj.lease <= now:
                self.settle(obj.unit(), now)

    def end_leases(self, now: float, limit: int) -> int:
        """Let up to `limit` units go that were leased, or fresh, and whose time is over; how many."""
        units = self._fresh.ended(now, limit)
        units += self.probes.ended(now, limit - len(units))
        for unit in units:
            self.settle(unit, now)
        done = len(units)
        while done < limit and (lease := self.reads.ended(now)) is not None:
            done += len(lease.objects)
            self.end_reading(lease.number, now)
        return done

    def end_soft_pins(self, now: float, limit: int) -> None:
        """Reads do not move the end of a pin, and it does not come back."""
        pins = self._pins
        while pins and pins[0][0] <= now and limit:
            limit -= 1
            obj = heapq.heappop(pins)[2]
            if obj.flags & GONE:
                continue
            unit = obj.unit()
            held = unit in self._soft
            self._take_out(unit)
            obj.flags &= ~SOFT_PIN
            self.soft_pinned -= 1
            self._pinned_until.pop(obj.key, None)
            if obj.group is not None and obj.group.soft_until <= now:
                obj.group.flags &= ~SOFT_PIN
            if held:
                self.settle(unit, now)

    def pinned_until(self, obj: Object) -> float:
        """The end of its soft pin; 0 without one."""
        return self._pinned_until.get(obj.key, 0.0) if obj.flags & SOFT_PIN else 0.0

    # -- eviction

    def settle(self, unit: Unit, now: float) -> None:
        """Put `unit` at the end of the eviction order, if it may go at all."""
        if self._may_go(unit, now):
            if unit.flags & FRESH:
                self._fresh.remove(unit)
            self._order_of(unit).touch(unit)

    def unpark(self, segment: Segment, now: float) -> None:
        """Its server is back, or lost for good: what was left alone in the meantime may go again."""
        parked, segment.parked = segment.parked, []
        for unit in parked:
            if not unit.flags & GONE:
                self.settle(unit, now)

    def evict(self, room: int, now: float, limit: int) -> int:
        """Evict units that were not used lately until `room` bytes will come free, looking at no more than `limit`; how
        many bytes will.  None that was put goes before one that was read longer ago and is still leased for it."""
        leased = self.probes.oldest()
        freed = 0
        while freed < room and limit:
            limit -= 1
            unit = self._idle.victim()
            if unit is None and (since := self._fresh.oldest()) is not None:
                if leased is not None and leased < since:
                    break
                unit = self._fresh.order.victim()
            unit = unit or self._soft_victim()
            if unit is None:
                break
            self._take_out(unit)
            freed += self._evict(unit, now)  # what may not go now comes back when it may
        return freed

    def evict_fresh(self, room: int, now: float, limit: int) -> int:
        """As evict, of units that were just put, whatever is leased."""
        freed = 0
        while freed < room and limit:
            limit -= 1
            unit = self._fresh.order.victim() or self._soft_victim()
            if unit is None:
                break
            self._take_out(unit)
            freed += self._evict(unit, now)
        return freed

    def order(self, length: int) -> Iterator[list[Unit]]:
        """The units that may leave, in the order in which they would, in lists (see EvictionPolicy.walk)."""
        yield from self._idle.walk(length)
        yield from self._soft.walk(length)

    def leave_first(self, unit: Unit) -> None:
        """`unit` shall leave before all others, unless it may not at all or was used under this master."""
        if not unit.lease and unit in self._order_of(unit):
            self._take_out(unit)
            self._order_of(unit).put_first(unit)

    def _soft_victim(self) -> Unit | None:
        return self._soft.victim() if self._config.allow_evict_soft_pinned else None

    def break_leases(self, room: int, now: float, limit: int) -> int:
        """As evict, of units under probe leases, the oldest first."""
        freed = 0
        while freed < room and limit:
            limit -= 1
            unit = self.probes.break_oldest(now - self._config.break_lease_after_s)
            if unit is None:
                break
            if unit.flags & SOFT_PIN and not self._config.allow_evict_soft_pinned:
                self.settle(unit, now)
                continue
            self._take_out(unit)
            freed += self._evict(unit, now)
        return freed

    def _evict(self, unit: Unit, now: float) -> int:
        if not self._may_go(unit, now):
            return 0
        members = list(unit.members.values()) if isinstance(unit, Group) else [unit]
        objects = [obj for obj in members if isinstance(obj, Object)]
        for obj in objects:
            for part in parts(obj):
                if part.segment.suspect:  # evicting from it would bring nothing back
                    part.segment.parked.append(unit)
                    return 0
        if self._config.enable_offload:
            awaited = self.disks.write_first(unit, objects)
            if awaited is not None:
                return awaited
        freed = sum(part.taken for obj in objects for part in parts(obj))
        left = [obj for obj in objects if in_memory(obj)]
        self._count_evicted("_mem", left)
        if all(map(on_disk, objects)):
            for obj in left:
                self.leave_memory(obj, now)
            return freed
        if isinstance(unit, Group):
            self._tombstones.note_group(unit.name, self.newest_seq())
        self._count_evicted("", objects)
        for obj in objects:
            self.forget(obj, now)
        return freed

    def _count_evicted(self, suffix: str, objects: list[Object]) -> None:
        self._counters["master_evicted_key_count" + suffix] += len(objects)
        self._counters["master_evicted_size_bytes" + suffix] += sum([obj.size for obj in objects])

    def leave_memory(self, obj: Object, now: float) -> None:
        """From now on `obj` is only on disk."""
        self._give_back(obj, list(parts(obj)), now, clean=True)
        lay(obj, ())
        self.only_on_disk += 1
        if obj.group is None:
            self._take_out(obj)
        self.changed(obj)

    def evict_now(self, unit: Unit, now: float) -> None:
        """`unit` was to leave memory when it is on disk; if nothing keeps it there, it goes."""
        if not unit.flags & GONE and self._may_go(unit, now):
            self._take_out(unit)
            self._evict(unit, now)

    def _may_go(self, unit: Unit, now: float) -> bool:
        if unit.lease > now or unit.readers or unit.flags & HARD_PIN:
            return False
        if isinstance(unit, Group):
            return not (unit.open or unit.pins) and any(map(in_memory, unit.members.values()))
        return isinstance(unit, Object) and in_memory(unit)

    def _take_out(self, unit: Unit) -> None:
        """Of the order that it is in, if it is in one."""
        self._order_of(unit).remove(unit)
        unit.flags &= ~FRESH

    def _order_of(self, unit: Unit) -> EvictionPolicy:
        if unit.flags & SOFT_PIN:
            return self._soft
        return self._fresh.order if unit.flags & FRESH else self._idle
