"""What a segment's owner does to its table: kills records at the master's word, lists them for a new master."""

import threading
from array import array
from collections import Counter
from collections.abc import Iterator

from mooncake.errors import ErrorCode
from mooncake.rpc.data_messages import Standing
from mooncake.rpc.messages import Announce, AnnouncePlain, Kill, Killed, Record
from mooncake.rpc.record_messages import Body
from mooncake.segment.writers import Writers
from mooncake.transfer import table
from mooncake.transfer.memory import SegmentMemory

ANNOUNCE_STEP = 1000  # records a message


class Owner:
    """One segment, its writers, and the kills that wait for a writer to be gone.

    Used by the link thread (kills, announcements) and by stream threads (`settle`); the lock covers `_waiting`.
    """

    def __init__(self, segment: int, memory: SegmentMemory, writers: Writers) -> None:
        self.segment = segment
        self.memory = memory
        self.writers = writers
        self._waiting: dict[int, int] = {}  # slot → seq
        self._held = Counter[int]()  # slots of records that this process itself reads or fills → by how many
        self._lock = threading.Lock()

    def kill(self, message: Kill) -> Killed:
        """Do what is asked; the answer names the records that are dead already."""
        killed = Killed(self.segment, [], [])
        records = self.memory.table
        for slot, seq, hide in zip(message.slots, message.seqs, message.hide, strict=True):
            if hide:
                state, found, _ = records.state(slot)
                if found == seq and state == table.COMPLETE:
                    records.set_state(slot, table.REMOVED)
            elif self._try_kill(slot, seq):
                killed.slots.append(slot)
                killed.seqs.append(seq)
            else:
                with self._lock:
                    self._waiting[slot] = seq
        return killed

    def settle(self) -> Killed | None:
        """Kills whose writer has gone since; None if there are none."""
        with self._lock:
            waiting = list(self._waiting.items())
        done = [(slot, seq) for slot, seq in waiting if self._try_kill(slot, seq)]
        if not done:
            return None
        with self._lock:
            for slot, seq in done:
                if self._waiting.get(slot) == seq:
                    del self._waiting[slot]
        return Killed(self.segment, [slot for slot, _ in done], [seq for _, seq in done])

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def waiting_kills(self) -> int:
        return len(self._waiting)

    def hold(self, slot: int) -> None:
        """Until as many calls of `let_go`, the record in `slot` is not called dead."""
        with self._lock:
            self._held[slot] += 1

    def let_go(self, slot: int) -> None:
        with self._lock:
            self._held[slot] -= 1
            if not self._held[slot]:
                del self._held[slot]

    def standing(self, asked: Standing) -> list[int]:
        """Of each record whether its bytes are still its own: 0 or a code.  (A REMOVED one's are, until it is DEAD.)"""
        records = self.memory.table
        codes = []
        for slot in asked.slots:
            state, seq, _ = records.state(slot) if 0 <= slot < records.slots else (table.EMPTY, 0, 0)
            stands = seq == asked.seq and state in (table.COMPLETE, table.REMOVED) and records.term == asked.term
            codes.append(0 if stands else int(ErrorCode.REPLICA_IS_GONE))
        return codes

    def serve_master(self, term: int, lease_ms: int) -> None:
        """From now on grants of older masters are void."""
        self.memory.table.set_term(term, lease_ms)
        with self._lock:
            self._waiting.clear()  # a new master asks for its own

    def announcements(self) -> Iterator[Announce | AnnouncePlain]:
        """Every live record, in messages of bounded size; the last one is marked."""
        plain: dict[str, _Columns] = {}
        others: list[Record] = []
        for view in self.memory.table.records():
            if _is_plain(view):
                client = view.body.client
                columns = plain.get(client) or plain.setdefault(client, _Columns())
                columns.add(view)
                if len(columns.keys) == ANNOUNCE_STEP:
                    yield plain.pop(client).message(self.segment, client)
            else:
                others.append(Record(view.slots, view.state, view.term, view.seq, view.body))
                if len(others) == ANNOUNCE_STEP:
                    yield Announce(self.segment, others, False)
                    others = []
        for client, columns in plain.items():
            yield columns.message(self.segment, client)
        yield Announce(self.segment, others, True)

    def _try_kill(self, slot: int, seq: int) -> bool:
        with self._lock:
            self.memory.table.revoke(slot, seq)
            return slot not in self._held and self._is_dead(slot, seq)

    def _is_dead(self, slot: int, seq: int) -> bool:
        records = self.memory.table
        state, found, number = records.state(slot)
        if found != seq or state in (table.EMPTY, table.DEAD, table.SPILL):
            if found <= seq or state == table.EMPTY:
                records.set_state(slot, table.DEAD)
            return True
        if state == table.WRITING:
            writer = self.writers.get(number)
            if writer is not None and writer.alive():
                writer.stop()
                return False
        records.set_state(slot, table.DEAD)
        return True


class _Columns:
    """Of an AnnouncePlain."""

    __slots__ = ("checksums", "keys", "offsets", "seqs", "sizes", "slots")

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.seqs, self.sizes, self.offsets, self.slots, self.checksums = (array("Q") for _ in range(5))

    def add(self, view: table.SlotView) -> None:
        body, slots = view.body, view.slots
        self.keys.append(body.key)
        self.seqs.append(view.seq)
        self.sizes.append(body.size)
        self.offsets.append(body.extents[0])
        self.slots.append(slots[0] << 8 | len(slots))
        self.checksums.append(body.checksum)

    def message(self, segment: int, client: str) -> AnnouncePlain:
        seqs, sizes, offsets, slots, checksums = (
            column.tobytes() for column in (self.seqs, self.sizes, self.offsets, self.slots, self.checksums)
        )
        if not any(self.checksums):
            checksums = b""
        return AnnouncePlain(segment, client, self.keys, seqs, sizes, offsets, slots, checksums)


def _is_plain(view: table.SlotView) -> bool:
    """Whether it may be in an AnnouncePlain."""
    body, slots = view.body, view.slots
    extents = body.extents
    return (
        view.state == table.COMPLETE
        and len(extents) == 2
        and extents[1] == body.size
        and slots[-1] - slots[0] == len(slots) - 1 < 255
        and extents[0] >= 0 < body.size
        and body == Body(body.key, body.size, extents, client=body.client, checksum=body.checksum)
    )
