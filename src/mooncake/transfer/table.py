"""The segment table: beside a segment's bytes, one record for every value in it.

The table makes the master's directory soft: a new master is filled from the tables.  It lives in shared memory
of its own (a memfd that the segment server owns and every same-host client maps), so that it takes nothing from
the segment's capacity.  Pages that no record has used yet cost no memory.

    header, 4096 bytes   magic, layout version, segment, size, slots, term, lease_ms, former term, since
    slot 0, slot 1, ...  SLOT_SIZE bytes each

    head slot   u64 revoked seq | u64 seq | u64 term | u32 writer | u32 body length | u32 next slot + 1 |
                u8 state ... padding to SLOT_HEADER | first bytes of the body
    spill slot  the same header with state SPILL, only `next` used, then more of the body

Who writes what: the master hands slots out (never two records in one slot at a time); a *writer* fills a record in
and moves it EMPTY/DEAD → WRITING → COMPLETE; only the *owner* (the segment server) writes the term, `revoked`
and moves a record to REMOVED or DEAD.  Two fences keep a late writer out, each side writing first and reading after:

    writer: state = WRITING, then reads `revoked` and `term`; goes on only if revoked < seq and term is the grant's
            (it looks before too: the slot of a grant that was revoked long ago may hold another record by now)
    owner:  revoked = seq,  then reads `state`; if WRITING, the extents stay quarantined until the writer is gone
    owner:  term = new,     then scans the states (re-mount)

A third one is for readers.  A master waits, before it gives room away, for the longest lease that its forerunner can
have given *before* this segment's term changed (`since`).  One given later, by a master that does not know yet that
it was followed, is void: so a reader looks, after it was told where a value is, which term the table has.
"""

import struct
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from mooncake.rpc.record_messages import Body

MAGIC = 0x4D4B5654
LAYOUT = 2
HEADER_SIZE = 4096
SLOT_SIZE = 256
SLOT_HEADER = 48
SLOT_ROOM = SLOT_SIZE - SLOT_HEADER
GRANULE = 256  # bytes: what the allocator rounds lengths to; as many slots as granules

EMPTY, WRITING, COMPLETE, REMOVED, DEAD, SPILL = range(6)
_LIVE = (COMPLETE, WRITING, REMOVED)

_HEADER = struct.Struct("<IIQQQQQQd")  # magic, layout, segment, size, slots, term, lease_ms, former, since
_TERMS = struct.Struct("<QQQd")  # the last four of them
_TERM_AT = 32
_SLOT = struct.Struct("<QQQIIIB")  # revoked, seq, term, writer, length, next + 1, state
_HEAD = struct.Struct(f"<QQIIIB{SLOT_HEADER - 37}x")  # all but revoked, which only the owner writes
_U64 = struct.Struct("<Q")
_FIRST_WORD, _SLOT_WORDS = HEADER_SIZE // _U64.size, SLOT_SIZE // _U64.size  # where slots begin with `revoked`
_STATE_AT = 36
_FIXED_BODY = 96  # msgpack of a Body without key, group, client and extents, rounded up
_EXTENT_BODY = 18
_UNUSED_RUN = 1 << 16  # the master hands out the lowest slots first, so a gap this long means the end

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Body).decode
_barrier = threading.Lock()


def fence() -> None:
    """Order this thread's earlier stores before its later loads, as other processes see them (a locked
    instruction is a full barrier on the processors we run on)."""
    with _barrier:
        pass


def slot_count(size: int) -> int:
    """How many slots the table of a segment of `size` bytes has."""
    return size // GRANULE + 1024


def table_size(size: int) -> int:
    """Bytes of the table of a segment of `size` bytes (virtual: unused pages take no memory)."""
    return HEADER_SIZE + slot_count(size) * SLOT_SIZE


def _text_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def slots_needed(key: str, group: str, client: str, extents: int) -> int:
    """Upper bound of the slots that the record of a part with `extents` extents takes."""
    length = _FIXED_BODY + _text_size(key) + _text_size(group) + len(client) + _EXTENT_BODY * extents
    return -(-length // SLOT_ROOM)


class SlotView(NamedTuple):
    """What a head slot says, and its whole record."""

    slots: list[int]
    state: int
    term: int
    seq: int
    writer: int
    body: Body


class Table:
    """One mapped table.  Writers and owner use the same class; who may call what is said above."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory[: len(memory) // _U64.size * _U64.size].cast("Q")

    def format(self, segment: int, size: int) -> None:
        _HEADER.pack_into(self._memory, 0, MAGIC, LAYOUT, segment, size, slot_count(size), 0, 0, 0, 0.0)

    def check(self, segment: int) -> None:
        """Raise ValueError unless this is the table of `segment` in a layout we know."""
        magic, layout, found, *_ = _HEADER.unpack_from(self._memory, 0)
        if magic != MAGIC or layout != LAYOUT or found != segment:
            raise ValueError(f"not the table of segment {segment:#x} (layout {layout}, expected {LAYOUT})")

    @property
    def segment(self) -> int:
        return int(_HEADER.unpack_from(self._memory, 0)[2])

    @property
    def slots(self) -> int:
        """Whoever maps the table can write anything there: not more than there is memory for."""
        return min(int(_HEADER.unpack_from(self._memory, 0)[4]), (len(self._memory) - HEADER_SIZE) // SLOT_SIZE)

    @property
    def term(self) -> int:
        return self._words[_TERM_AT // _U64.size]

    @property
    def lease_ms(self) -> int:
        return int(_U64.unpack_from(self._memory, _TERM_AT + 8)[0])

    def set_term(self, term: int, lease_ms: int) -> None:
        """Owner: from now on serve this master.  Scan only afterwards."""
        known, _, former, since = _TERMS.unpack_from(self._memory, _TERM_AT)
        if known != term:
            former, since = known, time.clock_gettime(time.CLOCK_BOOTTIME)
        _TERMS.pack_into(self._memory, _TERM_AT, known, lease_ms, former, since)
        _U64.pack_into(self._memory, _TERM_AT, term)
        fence()

    # -- reader

    def honours(self, term: int, sent: float) -> bool:
        """Whether a lease that master `term` gave to a request of `sent` (seconds, boot clock) counts for whoever is
        the master by now.  To be asked once, after the lease has come."""
        if _U64.unpack_from(self._memory, _TERM_AT)[0] == term:
            return True
        _, _, former, since = _TERMS.unpack_from(self._memory, _TERM_AT)
        return bool(former == term and sent <= since)

    # -- writer

    def begin(self, slots: list[int], seq: int, term: int, writer: int, body: Body) -> None:
        """Write the record in state WRITING.  `slots` must hold it (slots_needed)."""
        raw = _encode(body)
        length, memory = len(raw), self._memory
        if length <= SLOT_ROOM:
            at = HEADER_SIZE + slots[0] * SLOT_SIZE + _U64.size
            whole = _HEAD.pack(seq, term, writer, length, 0, WRITING) + raw
            memory[at : at + len(whole)] = whole
            return
        if length > len(slots) * SLOT_ROOM:
            raise ValueError(f"record of {length} bytes does not fit {len(slots)} slots")
        last = -(-length // SLOT_ROOM) - 1
        for i in range(len(slots) - 1, -1, -1):  # spills first: the head makes the record visible
            at = HEADER_SIZE + slots[i] * SLOT_SIZE + _U64.size
            follow = slots[i + 1] + 1 if i < len(slots) - 1 else 0
            head = _HEAD.pack(seq, term, writer, 0 if i else length, follow, SPILL if i else WRITING)
            whole = head + raw[i * SLOT_ROOM : (i + 1) * SLOT_ROOM] if i <= last else head
            memory[at : at + len(whole)] = whole

    def may_write(self, slot: int, seq: int, term: int) -> bool:
        """Whether the grant still stands: before `begin`, since the slots may be another record's otherwise; again
        after `begin` and a fence; and after COMPLETE and a fence: then a later master will find the record."""
        return self.term == term and self.is_granted(slot, seq)

    def is_granted(self, slot: int, seq: int) -> bool:
        """As may_write, the term apart."""
        return self._words[_FIRST_WORD + slot * _SLOT_WORDS] < seq

    def abandon(self, slot: int, seq: int) -> None:
        """A record of ours will not become whole.  If the slot is another record's by now, that one stays."""
        state, found, _ = self.state(slot)
        if found == seq and state == WRITING:
            self.set_state(slot, DEAD)

    def set_state(self, slot: int, state: int) -> None:
        self._memory[HEADER_SIZE + slot * SLOT_SIZE + _STATE_AT] = state

    # -- owner

    def state(self, slot: int) -> tuple[int, int, int]:
        """(state, seq, writer) of a slot."""
        _, seq, _, writer, _, _, state = _SLOT.unpack_from(self._memory, HEADER_SIZE + slot * SLOT_SIZE)
        return state, seq, writer

    def revoke(self, slot: int, seq: int) -> None:
        """From now on no writer with this or an older seq may begin in `slot`."""
        _U64.pack_into(self._memory, HEADER_SIZE + slot * SLOT_SIZE, seq)
        fence()

    def records(self) -> Iterator[SlotView]:
        """Every WRITING, COMPLETE or REMOVED record, by slot.  Stops at the first never-used page run."""
        memory = self._memory
        total = self.slots
        slot, used = -1, 0
        while (slot := slot + 1) < total:
            state = memory[HEADER_SIZE + slot * SLOT_SIZE + _STATE_AT]
            if state == EMPTY:
                if slot - used > _UNUSED_RUN:
                    return
                continue
            used = slot
            if state in _LIVE:
                view = self._read(slot)
                if view is not None:
                    yield view
                    if len(view.slots) == 2 and view.slots[1] == slot + 1:  # as nearly all of those in two slots
                        slot += 1

    def view(self, slot: int) -> SlotView | None:
        """What the record whose head is `slot` says; None if that is no record."""
        if not 0 <= slot < self.slots or self._memory[HEADER_SIZE + slot * SLOT_SIZE + _STATE_AT] == EMPTY:
            return None
        return self._read(slot)

    def _read(self, slot: int) -> SlotView | None:
        memory = self._memory
        base = HEADER_SIZE + slot * SLOT_SIZE
        _, seq, term, writer, length, follow, state = _SLOT.unpack_from(memory, base)
        slots = [slot]
        raw: bytes | memoryview = memory[base + SLOT_HEADER : base + SLOT_HEADER + min(length, SLOT_ROOM)]
        if follow or length > SLOT_ROOM:
            raw = self._gather(bytes(raw), slots, length, follow)
        try:
            body = _decode(raw)
        except msgspec.MsgspecError:
            return None  # a writer was stopped while it wrote the record
        return SlotView(slots, state, term, seq, writer, body)

    def _gather(self, raw: bytes, slots: list[int], length: int, follow: int) -> bytes:
        """The whole record that starts with `raw`; `slots` grows by those that it takes.  Empty if they are none."""
        memory, total = self._memory, self.slots
        while len(raw) < length and follow and len(slots) <= length // SLOT_ROOM:
            if follow > total:
                return b""
            slots.append(follow - 1)
            base = HEADER_SIZE + (follow - 1) * SLOT_SIZE
            raw += bytes(memory[base + SLOT_HEADER : base + SLOT_HEADER + min(length - len(raw), SLOT_ROOM)])
            follow = _SLOT.unpack_from(memory, base)[5]
        if follow > total:
            return b""
        if follow:
            slots.append(follow - 1)
        return raw
