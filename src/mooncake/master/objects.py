"""What the directory knows of a value: one `Object`, and how its bytes lie.

There may be millions, so the common case (one replica, one extent, slots in a row) lies flat in scalar fields and
everything rare in `Extra`; nothing here is seen by the garbage collector.  Measured with 115-byte keys: 128 bytes
for the object, 176 for the key, 32 each for offset, seq and slots.

    unit    what is evicted at once: an ungrouped object, or a Group with all its members
    lease   until when the unit is under a probe lease (a float shared by all that were touched in 10 ms)
    readers how many read leases are on it; while > 0 its bytes stay as they are, whatever happens to the key
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from mooncake.transfer.table import GRANULE

if TYPE_CHECKING:
    from mooncake.master.pool import Segment

HARD_PIN = 1
SOFT_PIN = 2
GONE = 4  # no longer in the directory; perhaps still being read
FRESH = 8  # was put a moment ago, see eviction.Fresh
REPLICATING = 16  # a copy or move task runs: it stays as it is
WRITING = 32  # to disk
UNWRITABLE = 64  # to disk, as was tried
PROMOTING = 128  # from disk
TOLD_MEMORY = 256  # what subscribers know of it, see kv_events
TOLD_DISK = 512
TOLD_ERA = 1024

SLOT_COUNT_BITS = 8
MOST_FLAT_SLOTS = (1 << SLOT_COUNT_BITS) - 1


def granules(length: int) -> int:
    """Bytes that the allocator takes for an extent of `length` bytes."""
    return -(-length // GRANULE) * GRANULE


class PartAt(msgspec.Struct, gc=False, eq=False, frozen=True):
    """Where one part of a replica lies; `extents` is flat: offset, length, ...  `seq` is that of its record if it has
    one of its own, being a later copy; else 0: the value's."""

    segment: Segment
    slots: tuple[int, ...]
    extents: tuple[int, ...]
    seq: int = 0

    @property
    def taken(self) -> int:
        """Bytes taken from the segment."""
        if len(self.extents) == 2:
            return granules(self.extents[1])
        return sum(granules(length) for length in self.extents[1::2])


Replica = tuple[PartAt, ...]


class Unit(msgspec.Struct, gc=False, eq=False):
    """What eviction orders.  `before` and `after` belong to the list of the policy that holds it."""

    lease: float = 0.0
    readers: int = 0
    flags: int = 0
    before: Unit | None = None
    after: Unit | None = None


class Group(Unit, gc=False, eq=False):
    """Objects that are evicted together.  `open`: puts in progress; `pins`: hard-pinned members."""

    name: str = ""
    open: int = 0
    pins: int = 0
    soft_until: float = 0.0
    members: dict[str, Object] = {}


class OnDisk(msgspec.Struct, gc=False, eq=False):
    """A copy on the disk of the server of `segment`, known there as `seq`.  `there`: it has said so itself."""

    segment: Segment
    seq: int
    there: bool


class Object(Unit, gc=False, eq=False):
    """One value.  Flat if `segment` is there: `size` bytes at `offset` of it.  Only on disk if neither that nor
    `replicas` is."""

    key: str = ""
    size: int = 0
    seq: int = 0
    segment: Segment | None = None
    offset: int = 0
    slots: int = 0  # first << 8 | count
    replicas: tuple[Replica, ...] = ()
    group: Group | None = None
    client: str = ""  # who wrote it
    disk: OnDisk | None = None

    def unit(self) -> Unit:
        return self if self.group is None else self.group


class SummedObject(Object, gc=False, eq=False):
    """One whose writer gave a checksum; the others shall not pay for the field."""

    checksum: int = 0


def checksum_of(obj: Object) -> int:
    """0: none."""
    return obj.checksum if type(obj) is SummedObject else 0


def with_checksum(obj: Object, checksum: int) -> Object:
    """`obj`, which nothing refers to yet, with its checksum if that is not 0."""
    if not checksum:
        return obj
    summed = SummedObject(checksum=checksum)
    for name in Object.__struct_fields__:
        setattr(summed, name, getattr(obj, name))
    return summed


def flat_slots(first: int, count: int) -> int:
    """What Object.slots holds for `count` slots from `first` on."""
    return first << SLOT_COUNT_BITS | count


def lay(obj: Object, replicas: tuple[Replica, ...]) -> None:
    """Say where `obj` lies, flat if possible."""
    if len(replicas) == 1 and len(replicas[0]) == 1 and not replicas[0][0].seq:
        part = replicas[0][0]
        slots, count = part.slots, len(part.slots)
        if len(part.extents) == 2 and count <= MOST_FLAT_SLOTS and slots[-1] - slots[0] == count - 1:
            obj.segment, obj.offset = part.segment, part.extents[0]
            obj.slots = flat_slots(slots[0], count)
            obj.replicas = ()
            return
    obj.segment, obj.offset, obj.slots, obj.replicas = None, 0, 0, replicas


def replicas(obj: Object) -> tuple[Replica, ...]:
    """All replicas of `obj`, however it lies."""
    if obj.segment is None:
        return obj.replicas
    first, count = obj.slots >> SLOT_COUNT_BITS, obj.slots & MOST_FLAT_SLOTS
    return ((PartAt(obj.segment, tuple(range(first, first + count)), (obj.offset, obj.size)),),)


def parts(obj: Object) -> Iterator[PartAt]:
    for replica in replicas(obj):
        yield from replica


def in_memory(obj: Object) -> bool:
    return obj.segment is not None or bool(obj.replicas)


def on_disk(obj: Object) -> bool:
    """Whether it can be read from disk."""
    disk = obj.disk
    return disk is not None and disk.there and disk.segment.tier is not None and disk.segment.mounted


def is_mounted(replica: Replica) -> bool:
    return all(part.segment.mounted for part in replica)


def is_leased(obj: Object, now: float) -> bool:
    group = obj.group
    return obj.lease > now or obj.readers > 0 or (group is not None and group.lease > now)


def place(replica: Replica) -> list[int]:
    """The wire's form: [segment, offset, length, ...]."""
    flat: list[int] = []
    for part in replica:
        number, extents = part.segment.number, part.extents
        for i in range(0, len(extents), 2):
            flat += (number, extents[i], extents[i + 1])
    return flat
