"""The memory that this process has registered for its peers, and when it may be used again.

`unregister` returns once nothing can write there any more: tcp streams that are serving such a range are cut if they
do not end soon, and copiers of other processes have left the epoch (see transfer.region_table).
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake.transfer.cma import has_ended, start_of
from mooncake.transfer.cuda.peers import HOST, Exports
from mooncake.transfer.pieces import Int64Array, Pieces
from mooncake.transfer.region_table import EMPTY, MAX_REGIONS, SLOTS, RegionTable, Snapshot

logger = logging.getLogger("mooncake.engine")

OK, INVALID, NOT_REGISTERED, BUSY, OVERLAP, NO_MEMORY = 0, -1, -3, -4, -7, -302

STREAM_GRACE = 1.0  # seconds a stream may go on with a range that is being unregistered
COPY_LIMIT = 5.0  # seconds a copier of another process is waited for
_POLL = 0.001


@dataclass(eq=False)
class _Use:
    """Ranges that a stream is being served from or to."""

    pieces: Pieces
    stream: socket.socket


class _Copier(NamedTuple):
    """A process that has a slot."""

    pid: int
    pidfd: int
    token: int


class _Columns(NamedTuple):
    """Of regions, sorted by base."""

    bases: Int64Array
    ends: Int64Array
    kinds: Int64Array  # see transfer.region_table
    rights: npt.NDArray[np.int8]  # what the processor may do

    def followed_by(self, other: "_Columns") -> "_Columns":
        return _Columns._make(np.concatenate([mine, theirs]) for mine, theirs in zip(self, other, strict=True))

    def at(self, index: npt.NDArray[Any]) -> "_Columns":
        return _Columns._make(column[index] for column in self)


_DEVICE, _READABLE, _WRITABLE = 0, 1, 2  # rights
_NONE = _Columns(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int8))


class Regions:
    """Non-overlapping ranges.  Thread-safe."""

    def __init__(self) -> None:
        self.table = RegionTable.create()
        self._changing = threading.Lock()  # one registration or unregistration at a time
        self._lock = threading.Condition()
        self._ordered: dict[int, int] = {}  # base → end, in order of registration
        self.exports = Exports()
        self._snapshot = EMPTY
        self._columns = _NONE
        self._uses: dict[int, _Use] = {}
        self._copiers: dict[int, _Copier] = {}  # by slot

    # -- registration

    def register(self, addresses: Sequence[int], capacities: Sequence[int]) -> tuple[int, str]:
        """All or none; a code and why."""
        if len(addresses) != len(capacities):
            return INVALID, f"{len(addresses)} addresses with {len(capacities)} lengths"
        if not len(addresses):
            return OK, ""
        try:
            bases, sizes = np.array(addresses, np.int64), np.array(capacities, np.int64)
        except (OverflowError, ValueError):
            return INVALID, "an address or a length is not a number of 63 bits"
        if bases.min() <= 0 or sizes.min() <= 0 or (bases + sizes).min() <= 0:
            return INVALID, "an address is null or a length is not positive"
        with self._changing:
            order = np.argsort(bases, kind="stable")
            new, new_ends = bases[order], (bases + sizes)[order]
            known = np.concatenate((self._columns.bases, new))
            ends = np.concatenate((self._columns.ends, new_ends))
            merged = np.argsort(known, kind="stable")
            if (ends[merged][:-1] > known[merged][1:]).any():
                return OVERLAP, "a range overlaps one that is registered already, or another of the list"
            if len(known) > MAX_REGIONS:
                return NO_MEMORY, f"more than {MAX_REGIONS} regions"
            try:
                added = self._added(new, new_ends)
            except ValueError as error:
                return INVALID, str(error)
            self._replace(self._columns.followed_by(added).at(merged))
            self._ordered.update(zip(bases.tolist(), (bases + sizes).tolist(), strict=True))
        return OK, ""

    def unregister(self, addresses: Sequence[int]) -> tuple[int, str]:
        """Of known ones, whatever the others are; a code and why.  May block, see above."""
        with self._changing:
            known = [address for address in dict.fromkeys(addresses) if address in self._ordered]
            code, reason = OK, ""
            if len(known) != len(addresses):
                code, reason = NOT_REGISTERED, "an address is not the start of a registered region"
            if known:
                gone = [(base, self._ordered.pop(base)) for base in known]
                self._replace(self._columns.at(~np.isin(self._columns.bases, np.array(known, np.int64))))
                self._wait_for_streams(gone)
                stopped = self._wait_for_copiers()
                if stopped:
                    return BUSY, (
                        f"processes {stopped} have been stopped in the middle of a copy for {COPY_LIMIT:.0f} s and may "
                        "finish that one system call when they are resumed; do not reuse the memory before"
                    )
        return code, reason

    def settle(self, ranges: list[tuple[int, int]]) -> list[int]:
        """Wait until copies to or from [base, end) that have begun are over: streams that take long are cut, processes
        that were stopped in the middle of one lose their way in.  Pids of those: each may finish one system call."""
        with self._changing:
            self._wait_for_streams(ranges)
            return self._wait_for_copiers()

    @property
    def registered(self) -> list[tuple[int, int]]:
        """Addresses and lengths, in order of registration."""
        return [(base, end - base) for base, end in list(self._ordered.items())]

    @property
    def first(self) -> int:
        """Address of the first region that was registered, 0 none."""
        return next(iter(self._ordered), 0)

    def covers(self, pieces: Pieces, write: bool) -> bool:
        """Whether every piece is known to be host memory mapped here (writable if `write`)."""
        with self._lock:
            snapshot, rights = self._snapshot, self._columns.rights
        if not snapshot.covers(pieces):
            return False
        index = np.searchsorted(snapshot.bases, pieces.addresses, side="right") - 1
        return bool((rights[index] >= (_WRITABLE if write else _READABLE)).all())

    def contains(self, pieces: Pieces) -> bool:
        """Whether every piece lies inside one region."""
        with self._lock:
            return self._snapshot.covers(pieces)

    # -- serving streams

    @contextmanager
    def use(self, pieces: Pieces, stream: socket.socket) -> Iterator[bool]:
        """Serve `stream` from or to `pieces`: whether they are registered, which holds as long as the stream does."""
        number = threading.get_ident()
        with self._lock:
            registered = self._snapshot.covers(pieces)
            if registered:
                self._uses[number] = _Use(pieces, stream)
        try:
            yield registered
        finally:
            with self._lock:
                if self._uses.pop(number, None) is not None:
                    self._lock.notify_all()

    # -- copying processes

    def admit(self, pid: int, start: int) -> tuple[int, int, int]:
        """(slot, token, pidfd) for a process that is going to copy; slot -1 if it cannot be had."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return -1, 0, -1
        with self._lock:
            slot = self._free_slot()
            try:
                same = start_of(pid) == start
            except OSError:
                same = False
            if slot < 0 or not same:
                os.close(pidfd)
                return -1, 0, -1
            token = secrets.randbits(63) + 1
            self.table.assign(slot, token)
            self._copiers[slot] = _Copier(pid, pidfd, token)
        return slot, token, pidfd

    def dismiss(self, slot: int, token: int) -> None:
        """The process has ended."""
        with self._lock:
            copier = self._copiers.get(slot)
            if copier is not None and copier.token == token and has_ended(copier.pidfd):
                self._drop(slot)

    def close(self) -> None:
        """Nobody may begin anything any more."""
        self.unregister(list(self._ordered))
        with self._lock:
            for slot in list(self._copiers):
                self._drop(slot)
        self.table.close()

    # -- inside

    def _added(self, bases: Int64Array, ends: Int64Array) -> _Columns:
        """New regions; raises ValueError with a sentence if one is no memory."""
        kinds = [self.exports.kind_of(base, end) for base, end in zip(bases.tolist(), ends.tolist(), strict=True)]
        readable, writable = _rights(bases, ends)
        rights = readable.astype(np.int8) + writable
        for i, kind in enumerate(kinds):
            if kind is None or (kind == HOST and not readable[i]):
                raise ValueError(
                    f"the range of {ends[i] - bases[i]} bytes at {bases[i]:#x} is neither readable host memory nor "
                    "device memory of this process"
                )
            if kind != HOST:
                rights[i] = _DEVICE
        return _Columns(bases, ends, np.array(kinds, np.int64), rights)

    def _replace(self, columns: _Columns) -> None:
        with self._lock:
            self.table.publish(columns.bases, columns.ends, columns.kinds)
            self._snapshot = Snapshot(self.table.version, columns.bases, columns.ends, columns.kinds)
            self._columns = columns

    def _wait_for_streams(self, gone: list[tuple[int, int]]) -> None:
        def waiting() -> list[_Use]:
            return [use for use in self._uses.values() if use in concerned]

        with self._lock:
            concerned = [use for use in self._uses.values() if _touches(use.pieces, gone)]
            if not self._lock.wait_for(lambda: not waiting(), STREAM_GRACE):
                for use in waiting():
                    with contextlib.suppress(OSError):
                        use.stream.shutdown(socket.SHUT_RDWR)
                self._lock.wait_for(lambda: not waiting(), COPY_LIMIT)

    def _wait_for_copiers(self) -> list[int]:
        """Pids of those that have not left the epoch in time; they have no slot any more."""
        with self._lock:
            former = self.table.advance()
            busy = [slot for slot in self._copiers if self.table.copies(slot, former)]
        give_up = time.monotonic() + COPY_LIMIT
        stopped = []
        for slot in busy:
            while self.table.copies(slot, former):
                with self._lock:
                    copier = self._copiers.get(slot)
                if copier is None or has_ended(copier.pidfd):
                    break
                if not self.table.holds(slot, copier.token):
                    break  # was waited for in vain before
                if time.monotonic() > give_up:
                    self.table.revoke(slot)
                    stopped.append(copier.pid)
                    break
                time.sleep(_POLL)
        return stopped

    def _free_slot(self) -> int:
        for slot in range(SLOTS):
            copier = self._copiers.get(slot)
            if copier is None:
                return slot
            left = not (
                self.table.holds(slot, copier.token) or self.table.copies(slot, 0) or self.table.copies(slot, 1)
            )
            if left or has_ended(copier.pidfd):
                self._drop(slot)
                return slot
        return -1

    def _drop(self, slot: int) -> None:
        self.table.revoke(slot)
        os.close(self._copiers.pop(slot).pidfd)


def _touches(pieces: Pieces, ranges: list[tuple[int, int]]) -> bool:
    ends = pieces.addresses + pieces.lengths
    return any(bool(((pieces.addresses < end) & (ends > base)).any()) for base, end in ranges)


def _rights(bases: Int64Array, ends: Int64Array) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(readable, also writable) of ranges of this process's memory, by /proc/self/maps."""
    readable: list[list[int]] = []
    writable: list[list[int]] = []
    with open("/proc/self/maps") as f:
        for line in f:
            low_high, rights = line.split(maxsplit=2)[:2]
            low, _, high = low_high.partition("-")
            for runs, letter in ((readable, "r"), (writable, "rw")):
                if not rights.startswith(letter):
                    continue
                if runs and runs[-1][1] == int(low, 16):
                    runs[-1][1] = int(high, 16)
                else:
                    runs.append([int(low, 16), int(high, 16)])
    pieces = Pieces(bases, ends - bases)
    return _inside(readable, pieces), _inside(writable, pieces)


def _inside(runs: list[list[int]], pieces: Pieces) -> npt.NDArray[np.bool_]:
    table = np.array([run for run in runs if run[1] < 1 << 62] or [[0, 0]], np.int64)
    index = np.searchsorted(table[:, 0], pieces.addresses, side="right") - 1
    return np.asarray((index >= 0) & (pieces.addresses + pieces.lengths <= table[np.maximum(index, 0), 1]))
