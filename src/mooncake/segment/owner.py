"""What a segment's owner does to its table: kills records at the master's word, lists them for a new master."""

import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import cast

import msgspec

from mooncake.rpc.messages import Announce, Kill, Killed, Record, WrittenRecord
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

    def serve_master(self, term: int, lease_ms: int) -> None:
        """From now on grants of older masters are void."""
        self.memory.table.set_term(term, lease_ms)
        with self._lock:
            self._waiting.clear()  # a new master asks for its own

    def announcements(self) -> Iterator[Announce]:
        """Every live record, in messages of bounded size; the last one is marked."""
        views = self.memory.table.records()
        records = [_record(view) for view in islice(views, ANNOUNCE_STEP)]
        while True:
            following = [_record(view) for view in islice(views, ANNOUNCE_STEP)]
            yield Announce(self.segment, records, not following)
            if not following:
                return
            records = following

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


def _record(view: table.SlotView) -> Record:
    record = WrittenRecord(view.slots, view.state, view.term, view.seq, msgspec.Raw(view.raw))
    return cast(Record, record)  # to whom it is sent
