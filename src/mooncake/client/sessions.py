"""Values that are written, or read, in several calls.

A put session has its room granted from the start; what is written to it gathers in memory of this process, and crosses
into the pool when the session ends: a value is never seen in part, and a writer that dies leaves nothing behind.
A get session holds a read lease, so that all its reads are of one value.
"""

import errno
import threading
from collections.abc import Iterable, Sequence

import msgspec

from mooncake.client.fragments import Fragment, read_fragments
from mooncake.client.get import GetPipeline, Located, now
from mooncake.client.put import PutPipeline, Trust
from mooncake.client.scratch import Scratch
from mooncake.errors import ErrorCode, TransferError
from mooncake.rpc.messages import Found, Grant, PutOptions, PutStarted
from mooncake.transfer.pieces import Pieces, pieces_of

INVALID = int(ErrorCode.INVALID_PARAMS)

Fragments = list[tuple[int, int, int]]
"""(address, size, offset in the value) of each."""


class _Started:
    """What the puts of one start have in common."""

    def __init__(self, answer: PutStarted, options: PutOptions | None, staging: Scratch) -> None:
        self.answer = PutStarted(answer.term, [], answer.scope)
        self.options = options
        self.staging = staging


class _OpenPut:
    """One value: `size` bytes that gather at `at` of its staging memory.  `index`: of its key in the start."""

    def __init__(self, started: _Started, index: int, key: str, size: int, at: int, grant: Grant) -> None:
        self.started = started
        self.index = index
        self.key = key
        self.size = size
        self.at = at
        self.grant = grant


class PutSessions:
    """The open ones of this client, by key."""

    def __init__(self, puts: PutPipeline) -> None:
        self._puts = puts
        self._open: dict[str, _OpenPut] = {}
        self._lock = threading.Lock()

    def start(self, keys: list[str], sizes: list[int], options: PutOptions | None) -> list[int]:
        """A code a key: 0; OBJECT_ALREADY_EXISTS; INVALID_PARAMS if it is open here already.  Raises StoreError."""
        with self._lock:
            wanted = [i for i, key in enumerate(keys) if key and sizes[i] > 0 and key not in self._open]
        codes = [INVALID] * len(keys)
        if not wanted:
            return codes
        if options is not None and options.groups:
            options.groups = [options.groups[i] for i in wanted]
        answer = self._puts.start([keys[i] for i in wanted], [sizes[i] for i in wanted], options)
        granted = [(i, grant) for i, grant in zip(wanted, answer.grants, strict=True) if isinstance(grant, Grant)]
        for i, grant in zip(wanted, answer.grants, strict=True):
            codes[i] = grant if isinstance(grant, int) else 0
        if not granted:
            return codes
        try:
            started = _Started(answer, options, Scratch(sum(sizes[i] for i, _ in granted)))
        except (OSError, ValueError, OverflowError):
            self._puts.give_up([grant.seq for _, grant in granted])
            raise OSError(errno.ENOMEM, "no memory for what the sessions will be given") from None
        at = 0
        with self._lock:
            for i, grant in granted:
                self._open[keys[i]] = _OpenPut(started, wanted.index(i), keys[i], sizes[i], at, grant)
                at += sizes[i]
        return codes

    def write(self, key: str, fragments: Fragments, trust: Trust) -> int:
        """Copy fragments to where they belong in the value; bytes, or a code."""
        put = self._open.get(key)
        if put is None or not _lie_within(fragments, put.size):
            return INVALID
        if not fragments:
            return int(ErrorCode.INVALID_REPLICA)
        some = [fragment for fragment in fragments if fragment[1]]
        if some:
            pieces = _pieces(some)
            ranges = [x for _, size, offset in some for x in (put.at + offset, size)]
            try:
                put.started.staging.room.fill(ranges, pieces, trust(pieces))
            except TransferError as error:
                return int(error.code)
        return sum(size for _, size, _ in some)

    def end(self, keys: Sequence[str]) -> list[int]:
        """Make the values visible; INVALID_PARAMS for keys that are not open here."""
        codes = [INVALID] * len(keys)
        by_start: dict[_Started, list[tuple[int, _OpenPut]]] = {}
        for i, put in self._take(keys):
            by_start.setdefault(put.started, []).append((i, put))
        for started, some in by_start.items():
            for (i, _), code in zip(some, self._complete(started, [put for _, put in some]), strict=True):
                codes[i] = code
        return codes

    def revoke(self, keys: Sequence[str]) -> list[int]:
        """Forget the values; INVALID_PARAMS for keys that are not open here."""
        codes = [INVALID] * len(keys)
        taken = self._take(keys)
        answers = self._puts.give_up([put.grant.seq for _, put in taken]) if taken else []
        for (i, _), code in zip(taken, answers, strict=True):
            codes[i] = 0 if code == ErrorCode.INVALID_WRITE else code  # the master has forgotten it already
        return codes

    def _take(self, keys: Sequence[str]) -> list[tuple[int, _OpenPut]]:
        with self._lock:
            return [(i, put) for i, key in enumerate(keys) if (put := self._open.pop(key, None)) is not None]

    def _complete(self, started: _Started, puts: list[_OpenPut]) -> list[int]:
        options = started.options
        if options is not None and options.groups:
            options = msgspec.structs.replace(options, groups=[options.groups[put.index] for put in puts])
        base = started.staging.address
        return self._puts.complete(
            [put.key for put in puts],
            [put.size for put in puts],
            [put.grant for put in puts],
            started.answer,
            lambda values: pieces_of([base + puts[i].at for i in values], [puts[i].size for i in values]),
            options,
        )


class _Reading:
    """The values of one start, under one lease; `left`: those whose session has not ended."""

    def __init__(self, located: Located) -> None:
        self.located = located
        self.left = 0


class GetSessions:
    """The open ones of this client, by key."""

    def __init__(self, gets: GetPipeline) -> None:
        self._gets = gets
        self._open: dict[str, tuple[_Reading, Found]] = {}
        self._lock = threading.Lock()

    def start(self, keys: list[str]) -> list[int]:
        """A code a key.  A key that is open already is looked for again.  Raises StoreError."""
        located = self._gets.locate(keys)
        reading = _Reading(located)
        with self._lock:
            for key, found in zip(keys, located.found, strict=True):
                if not isinstance(found, int):
                    self._close(key)
                    self._open[key] = (reading, found)
                    reading.left += 1
        return [found if isinstance(found, int) else 0 for found in located.found]

    def read(self, keys: Sequence[str], all_fragments: Sequence[Fragments | None], trust: Trust) -> list[int]:
        """Copy fragments of values to addresses; bytes a key, or a code.  None: what was asked is impossible."""
        results = [INVALID] * len(keys)
        by_reading: dict[_Reading, list[tuple[int, Fragment]]] = {}
        for i, (key, fragments) in enumerate(zip(keys, all_fragments, strict=True)):
            reading, found = self._open.get(key, (None, None))
            if reading is None or found is None or fragments is None or not _lie_within(fragments, found.size):
                continue
            if now() >= reading.located.deadline:
                results[i] = int(ErrorCode.LEASE_EXPIRED)
                continue
            results[i] = sum(size for _, size, _ in fragments)
            for address, size, offset in fragments:
                if size:
                    by_reading.setdefault(reading, []).append((i, Fragment(key, found, offset, address, size)))
        for reading, some in by_reading.items():
            codes = read_fragments(self._gets, [fragment for _, fragment in some], reading.located, trust)
            for (i, _), code in zip(some, codes, strict=True):
                results[i] = code or results[i]
        return results

    def end(self, keys: Sequence[str]) -> None:
        """Hand the leases back."""
        with self._lock:
            for key in keys:
                self._close(key)

    def _close(self, key: str) -> None:
        reading, _ = self._open.pop(key, (None, None))
        if reading is not None:
            reading.left -= 1
            if not reading.left:
                self._gets.finish(reading.located)


def fragments_of(addresses: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]) -> Fragments | None:
    """The fragments of one value; None if the lists differ in length or an entry is impossible."""
    if not len(addresses) == len(sizes) == len(offsets):
        return None
    possible = all(0 < address < 1 << 63 for address in addresses) and min([*sizes, *offsets, 0]) >= 0
    return list(zip(addresses, sizes, offsets, strict=True)) if possible else None


def _lie_within(fragments: Iterable[tuple[int, int, int]], size: int) -> bool:
    return all(offset + length <= size for _, length, offset in fragments)


def _pieces(fragments: Fragments) -> Pieces:
    return pieces_of([address for address, _, _ in fragments], [size for _, size, _ in fragments])
