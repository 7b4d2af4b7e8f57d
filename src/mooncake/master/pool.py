"""The mounted segments: what is free in them, who serves them, and which records their owners still have to kill.

Life of a freed extent (the owner is the segment's server):

    in use ──kill──► doomed ──────────────► Kill(0) sent ── Killed ──► free
       └─────hide──► doomed, Kill(1) sent ──kill──┘
              (still being read, or its last readers are another master's)

Doomed extents are *quarantined*: they count as used, and nobody gets them before the owner's word.  What is doomed
stays listed until then and is sent again when a server comes back on a new connection.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Protocol

import msgspec

from mooncake.master.allocator import Allocator
from mooncake.master.objects import PartAt, Unit
from mooncake.master.slots import Slots
from mooncake.rpc.disk_messages import DiskOrders
from mooncake.rpc.message import Message
from mooncake.rpc.messages import Kill, SegmentInfo
from mooncake.transfer.table import slot_count

if TYPE_CHECKING:
    from mooncake.master.disks import Tier

log = logging.getLogger("mooncake.master")

SILENT_S = 3.0  # without a heartbeat for this long a segment gets nothing new
_KILLS_A_MESSAGE = 4096


class Account(Protocol):
    """Whose bytes are quarantined, where that is counted."""

    quarantined: int


class Doomed(msgspec.Struct, gc=False, eq=False):
    """A record that its owner shall kill.  `hidden`: only hide it yet.  `coming`: bytes expected back soon."""

    seq: int
    part: PartAt
    hidden: bool
    coming: int
    account: Account | None


class Segment:
    """One mount of one segment.  A new mount under the same number is another object."""

    __slots__ = (
        "allocator", "announced", "client", "coming", "deadline", "doomed", "drained", "draining", "filled",
        "first_seq", "heard", "host", "info", "leaving", "mounted", "name", "number", "old_until", "orders", "outbox",
        "parked", "quarantined", "retiring", "send", "size", "slots", "term", "tier",
    )  # fmt: skip

    def __init__(self, info: SegmentInfo, term: int, now: float, known: bool) -> None:
        self.info = info
        self.number, self.name, self.size = info.segment, info.name, info.size
        self.host, self.client = info.host, info.client
        self.term = term  # of this master when the server last mounted it
        self.allocator = Allocator(info.size, known)
        self.slots = Slots(slot_count(info.size), known)
        self.mounted = True
        self.announced = known  # every record of its table is in,
        self.filled = known  # and it is known what is free
        self.draining = False  # gets nothing new (see drains)
        self.drained = False  # and is empty
        self.retiring = False  # is to go, whatever becomes of a drain job
        self.first_seq = 0  # records with a lower one are from before this mount,
        self.old_until = now  # and may be read until then by readers that we do not know
        self.heard = now
        self.deadline = now  # expires then unless heard of
        self.doomed: dict[int, Doomed] = {}  # by head slot
        self.coming = 0
        self.quarantined = 0
        self.parked: list[Unit] = []  # units that came up for eviction while the segment was suspect
        self.outbox: list[tuple[int, int, bool]] = []
        self.send: Callable[[Message], None] | None = None
        self.tier: Tier | None = None  # what its server keeps on disk
        self.orders: DiskOrders | None = None  # about that, to be sent
        self.leaving = 0  # bytes that come free when they have been written to disk

    @property
    def suspect(self) -> bool:
        return self.send is None


class Pool:
    """All mounted segments.  `placeable` are those that may get new extents, in the order of mounting."""

    def __init__(self, term: int) -> None:
        self.term = term
        self.segments: dict[int, Segment] = {}
        self.placeable: list[Segment] = []
        self.dirty: list[Segment] = []  # have an outbox
        self.account: Account | None = None  # whose is what is taken back now
        self._later: list[tuple[float, int, Segment, int, int]] = []
        self._order = count()

    # -- totals

    @property
    def capacity(self) -> int:
        return sum(segment.size for segment in self.segments.values())

    @property
    def used(self) -> int:
        return sum(segment.allocator.used for segment in self.segments.values())

    @property
    def quarantined(self) -> int:
        return sum(segment.quarantined for segment in self.segments.values())

    def room(self) -> tuple[int, int]:
        """(bytes free now, bytes that come free when owners confirm), of the segments that may get something new."""
        free = coming = 0
        for segment in self.placeable:
            free += segment.allocator.free
            coming += segment.coming + segment.leaving
        return free, coming

    def reachable(self, now: float) -> int:
        """Bytes that eviction of everything could make free: all but those whose owners or readers hold them back, as
        a former master's readers may do with all that was there before a mount."""
        return sum(
            (segment.allocator.free if now < segment.old_until else segment.size - segment.quarantined) + segment.coming
            for segment in self.placeable
        )

    def fill(self) -> float:
        """Share of the placeable bytes, or of their table slots if that is higher, that is in use for good."""
        size = used = total = taken = coming = 0
        for segment in self.placeable:
            size += segment.size
            used += segment.allocator.used
            coming += segment.coming + segment.leaving
            total += segment.slots.total
            taken += segment.slots.used
        if not size:
            return 0.0
        return max((used - coming) / size, 0.0 if coming else taken / total)

    # -- membership

    def add(self, segment: Segment, now: float) -> None:
        self.segments[segment.number] = segment
        self.refresh(now)

    def drop(self, segment: Segment, now: float) -> None:
        """Unmounted or expired: all that was in it is gone."""
        segment.mounted = False
        segment.send = None
        for doomed in segment.doomed.values():
            if doomed.account is not None:
                doomed.account.quarantined -= doomed.part.taken
        segment.doomed.clear()
        segment.outbox.clear()
        segment.coming = segment.quarantined = segment.leaving = 0
        segment.orders = None
        if self.segments.get(segment.number) is segment:
            del self.segments[segment.number]
        self.refresh(now)

    def refresh(self, now: float) -> None:
        """Work out which segments may get something new."""
        self.placeable = [
            segment
            for segment in self.segments.values()
            if segment.filled
            and segment.send is not None
            and segment.term == self.term
            and not segment.draining
            and now - segment.heard < SILENT_S
        ]

    # -- killing

    def kill(self, part: PartAt, seq: int, now: float, *, clean: bool) -> None:
        """Take the extents of a record back.  `clean`: nobody can be writing or reading, so expect them soon."""
        segment, seq = part.segment, part.seq or seq
        if not segment.mounted:
            return
        if seq < segment.first_seq and now < segment.old_until:
            self.kill_after(part, seq, segment.old_until)
        else:
            self.kill_unread(part, seq, clean=clean)

    def kill_unread(self, part: PartAt, seq: int, *, clean: bool) -> None:
        """As kill, for a record that cannot have a reader whom we do not know."""
        segment, seq = part.segment, part.seq or seq
        doomed = segment.doomed.get(part.slots[0])
        if doomed is None:
            doomed = self._doom(part, seq, hidden=False)
        elif doomed.hidden:
            doomed.hidden = False
        else:
            return
        if clean:
            doomed.coming = part.taken
            segment.coming += doomed.coming
        self._post(segment, part.slots[0], seq, hidden=False)

    def hide(self, part: PartAt, seq: int) -> None:
        """Nobody may find the record any more; its bytes stay as they are until it is killed."""
        seq = part.seq or seq
        if part.segment.mounted and part.slots[0] not in part.segment.doomed:
            self._doom(part, seq, hidden=True)
            self._post(part.segment, part.slots[0], seq, hidden=True)

    def _doom(self, part: PartAt, seq: int, *, hidden: bool) -> Doomed:
        account = self.account
        doomed = Doomed(seq, part, hidden, 0, account)
        part.segment.doomed[part.slots[0]] = doomed
        part.segment.quarantined += part.taken
        if account is not None:
            account.quarantined += part.taken
        return doomed

    def _post(self, segment: Segment, slot: int, seq: int, *, hidden: bool) -> None:
        if segment.send is not None:
            if not segment.outbox:
                self.dirty.append(segment)
            segment.outbox.append((slot, seq, hidden))

    def kill_after(self, part: PartAt, seq: int, when: float) -> None:
        """Hide the record now; kill it when the last reader that may know it is over."""
        seq = part.seq or seq
        self.hide(part, seq)
        heapq.heappush(self._later, (when, next(self._order), part.segment, part.slots[0], seq))

    def kill_due(self, now: float, limit: int) -> int:
        """Kill up to `limit` hidden records whose unknown readers are over; how many."""
        later = self._later
        done = 0
        while later and later[0][0] <= now and done < limit:
            _, _, segment, slot, seq = heapq.heappop(later)
            doomed = segment.doomed.get(slot)
            if doomed is not None and doomed.seq == seq and doomed.hidden:
                self.kill_unread(doomed.part, seq, clean=True)
            done += 1
        return done

    def killed(self, segment: Segment, slots: list[int], seqs: list[int]) -> None:
        """The owner's word.  Frees what it names."""
        for slot, seq in zip(slots, seqs, strict=True):
            doomed = segment.doomed.get(slot)
            if doomed is not None and doomed.seq == seq and not doomed.hidden:
                del segment.doomed[slot]
                self._free(segment, doomed)

    def _free(self, segment: Segment, doomed: Doomed) -> None:
        part = doomed.part
        extents = part.extents
        segment.coming -= doomed.coming
        segment.quarantined -= part.taken
        if doomed.account is not None:
            doomed.account.quarantined -= part.taken
        for i in range(0, len(extents), 2):
            segment.allocator.release(extents[i], extents[i + 1])
        segment.slots.give(part.slots)

    def post_again(self, segment: Segment) -> None:
        """Its server is back on a new connection and may not have got what we sent before."""
        segment.outbox.clear()
        for slot, doomed in segment.doomed.items():
            self._post(segment, slot, doomed.seq, hidden=doomed.hidden)

    def order(self, segment: Segment) -> DiskOrders:
        """The orders that go to the server of `segment` next."""
        if segment.orders is None:
            segment.orders = DiskOrders(segment.number, [], [], [], [], [])
            self.dirty.append(segment)
        return segment.orders

    def take_outbox(self) -> Iterator[tuple[Segment, Kill | DiskOrders]]:
        """What there is to send, as messages."""
        dirty, self.dirty = self.dirty, []
        for segment in dirty:
            outbox, segment.outbox = segment.outbox, []
            for at in range(0, len(outbox), _KILLS_A_MESSAGE):
                slots, seqs, hidden = zip(*outbox[at : at + _KILLS_A_MESSAGE], strict=True)
                yield segment, Kill(segment.number, list(slots), list(seqs), bytes(hidden))
            orders, segment.orders = segment.orders, None
            if orders is not None:
                yield segment, orders
