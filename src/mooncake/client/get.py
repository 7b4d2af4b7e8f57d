"""The get pipeline: where is a batch, under a lease (one call) → copies → did the lease outlast the last byte?"""

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np

from mooncake.client.attachments import Attachments
from mooncake.client.checks import MISMATCH, Check, Checks, Damage
from mooncake.client.disk import DiskCut, DiskReads
from mooncake.client.leases import LeaseReturns
from mooncake.client.meter import Meter
from mooncake.client.put import PiecesOf, Trust
from mooncake.errors import ErrorCode, StoreError, TransferError
from mooncake.rpc.client import Client
from mooncake.rpc.messages import Codes, Found, GetReply, GetStart
from mooncake.rpc.record_messages import Damaged
from mooncake.transfer.base import Leased
from mooncake.transfer.checksums import Sums
from mooncake.transfer.pieces import Pieces, pieces_of
from mooncake.transfer.staging import sum_pieces
from mooncake.transfer.steps import finish

LEASE_MARGIN = 0.02  # of the lease, for the difference of two clocks' rates
_TOLD_AT_ONCE = 256  # damaged replicas in a message
_Checks = list[Check | None] | None  # what a batch's values are to be recognized by
ON_DISK = 4  # farther away than any memory (see Attachments.distance)


def now() -> float:
    """Seconds on a clock that goes on through suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Located(NamedTuple):
    """Where a batch is: a code or a Found a key; reading must end before `deadline` (see `now`)."""

    found: list[int | Found]
    lease: int
    deadline: float
    leased: Leased


class GetPipeline:
    def __init__(
        self,
        rpc: Client,
        attachments: Attachments,
        returns: LeaseReturns,
        disks: DiskReads,
        meter: Meter,
        checks: Checks,
    ) -> None:
        self._rpc = rpc
        self._checks = checks
        self._disks = disks
        self._returns = returns
        self._attachments = attachments
        self._meter = meter

    def locate(self, keys: list[str]) -> Located:
        """Raises StoreError."""
        return self.begin_locate(keys)()

    def begin_locate(self, keys: list[str]) -> Callable[[], Located]:
        """Ask; what is returned waits for the answer.  Both raise StoreError."""
        sent = now()
        try:
            asked = self._rpc.begin(GetStart(keys), GetReply)
        except StoreError as error:
            self._meter.not_read([int(error.code)] * len(keys))
            raise

        def located() -> Located:
            try:
                reply = asked()
            except StoreError as error:
                self._meter.not_read([int(error.code)] * len(keys))
                raise
            self._meter.looked_up(reply.found)
            deadline = sent + reply.lease_ms / 1e3 * (1 - LEASE_MARGIN)
            return Located(reply.found, reply.lease, deadline, Leased(reply.term, sent))

        return located

    def finish(self, located: Located) -> None:
        """Hand the lease back: everything is copied, or nothing will be."""
        if located.lease:
            self._returns.give(located.lease)

    def finish_batch(self, located: Located) -> None:
        """As finish, after all of the batch has been read."""
        self.finish(located)
        self._meter.got(self._meter.batch_get_time, now() - located.leased.sent)

    def get_one(self, key: str, room: Callable[[int], int], trust: Callable[[int, int], bool]) -> int:
        """Copy one value to where `room`(size) says: an address, or a code <= 0 that ends the call.  The value's
        size, or a code < 0."""
        try:
            located = self.locate([key])
        except StoreError as error:
            return int(error.code)
        found = located.found[0]
        if isinstance(found, int):
            return found
        code = self._read_one(located, key, found, room, trust)
        if code <= 0:
            self._meter.not_read((code,))
        self._meter.got(self._meter.get_time, now() - located.leased.sent)
        return code

    def _read_one(
        self, located: Located, key: str, found: Found, room: Callable[[int], int], trust: Callable[[int, int], bool]
    ) -> int:
        try:
            size = found.size
            check = self._check(key, found)
            address = room(size)
            if address <= 0:
                return address
            place = found.places[0]
            mapped = None
            if len(found.places) == 1 and len(place) == 3 and place[0] > 0:
                mapped = self._attachments.enter_mapped(place[0])
            if mapped is None:
                pieces = pieces_of([address], [size])
                trusted = trust(address, size)
                steps = self._fetch_steps(
                    [found.places],
                    lambda _: pieces,
                    located,
                    lambda _: trusted,
                    None if check is None else [check],
                )
                return finish(steps)[0] or size
            attachment, transport = mapped
            sums = Sums([size]) if check is not None and self._checks.cover(transport.name) else None
            try:
                trusted = trust(address, size)
                transport.get_one(place[1], size, address, trusted, located.leased)
                if sums is not None:
                    sum_pieces(pieces_of([address], [size]), trusted, sums)
            except StoreError as error:
                return int(error.code)
            finally:
                attachment.leave()
            if now() >= located.deadline:
                return int(ErrorCode.LEASE_EXPIRED)
            self._attachments.count(place[0], size, read=True)
            if sums is not None and check is not None and sums.found[0] != check.checksum:
                damage = Damage()
                damage.add(check, place)
                self._tell(damage)
                return MISMATCH
            return size
        finally:
            self.finish(located)

    def checks_of(self, keys: Sequence[str], founds: Sequence[Found]) -> _Checks:
        """What these values are to be recognized by; None: nothing is to be compared."""
        if not self._checks.on:
            return None
        checks = [self._check(key, found) for key, found in zip(keys, founds, strict=True)]
        return checks if any(checks) else None

    def must_be_whole(self, found: Found) -> bool:
        """Whether parts of this value are compared with its checksum, which takes all of it."""
        if not (self._checks.on and found.checksum):
            return False
        segments = {abs(place[at]) for place in found.places for at in range(0, len(place), 3)}
        return any(self._checks.cover(self._attachments.way(segment)) for segment in segments)

    def fetch(
        self,
        places: list[list[list[int]]],
        pieces_of: PiecesOf,
        located: Located,
        trust: Trust,
        checks: _Checks = None,
    ) -> list[int]:
        """As fetch_steps, at once."""
        return finish(self.fetch_steps(places, pieces_of, located, trust, checks))

    def fetch_steps(
        self,
        places: list[list[list[int]]],
        pieces_of: PiecesOf,
        located: Located,
        trust: Trust,
        checks: _Checks = None,
    ) -> Generator[None, None, list[int]]:
        """Copy values into pieces.  `places`: for each value the places of its replicas; `checks` as checks_of,
        of whole values only.  A code a value."""
        segment = _only_segment(places) if checks is None else 0
        if segment:
            ranges = list(itertools.chain.from_iterable(place[1:] for (place,) in places))
            code = yield from self._read_all(segment, ranges, pieces_of(range(len(places))), located, trust)
            codes = [code] * len(places)
        else:
            codes = yield from self._fetch_steps(places, pieces_of, located, trust, checks)
        self._meter.not_read(codes)
        return codes

    def _fetch_steps(
        self,
        places: list[list[list[int]]],
        pieces_of: PiecesOf,
        located: Located,
        trust: Trust,
        checks: _Checks,
    ) -> Generator[None, None, list[int]]:
        codes = [0] * len(places)
        damage = Damage()
        left = {
            i: replicas if len(replicas) == 1 else sorted(replicas, key=self._distance)
            for i, replicas in enumerate(places)
        }
        while left:
            failed: list[int] = []
            shares = self._by_segment(left)
            for segment in sorted(shares, reverse=True):  # what is on disk last: that may take longer than the lease
                share = shares[segment]
                if segment < 0:
                    got = self._read_disk(-segment, share, pieces_of, trust, checks)
                else:
                    got = yield from self._read(segment, share, pieces_of, located, trust, checks)
                for cut, code in zip(share, got, strict=True):
                    if code:
                        failed.append(cut.value)
                        codes[cut.value] = code
            if checks is not None:
                failed += self._compare_scattered(left, checks, codes, pieces_of, located.deadline, trust)
                for i in dict.fromkeys(failed):
                    check = checks[i]
                    if codes[i] == MISMATCH and check is not None:
                        damage.add(check, left[i][0])
            left = {i: left[i][1:] for i in dict.fromkeys(failed) if len(left[i]) > 1 and now() < located.deadline}
            for i in left:
                codes[i] = 0
        if damage.keys:
            self._tell(damage)
        return codes

    def _read(
        self,
        segment: int,
        share: "list[_Cut]",
        pieces_of: PiecesOf,
        located: Located,
        trust: Trust,
        checks: _Checks,
    ) -> Generator[None, None, list[int]]:
        """A code for each of the share."""
        ranges = list(itertools.chain.from_iterable(cut.ranges for cut in share))
        sums: Sums | None = None

        def wanted(transport: str) -> Sums | None:
            nonlocal sums
            sums = self._sums_of(transport, share, [sum(cut.ranges[1::2]) for cut in share], checks)
            return sums

        vector = _pieces(share, pieces_of)
        code = yield from self._read_all(segment, ranges, vector, located, trust, None if checks is None else wanted)
        return [code] * len(share) if code else _compared(share, sums, checks)

    def _check(self, key: str, found: Found) -> Check | None:
        return Check(key, found.checksum) if self._checks.on and found.checksum else None

    def _tell(self, damage: Damage) -> None:
        """The master, which drops the replicas; whoever asks next hears of other ones."""
        self._meter.mismatches += len(damage.keys)
        for at in range(0, len(damage.keys), _TOLD_AT_ONCE):
            some = slice(at, at + _TOLD_AT_ONCE)
            message = Damaged(damage.keys[some], damage.checksums[some], damage.places[some])
            with contextlib.suppress(StoreError):
                self._rpc.call(message, Codes)

    def _compare_scattered(
        self,
        left: dict[int, list[list[int]]],
        checks: list[Check | None],
        codes: list[int],
        pieces_of: PiecesOf,
        deadline: float,
        trust: Trust,
    ) -> list[int]:
        """Of the values that came from several segments, which together make up the checksum: those that are not as
        they were put; fills `codes` in."""
        damaged = []
        for i, replicas in left.items():
            check, place = checks[i], replicas[0]
            segments = set(place[0::3]) if place[0] > 0 else set()
            if check is None or codes[i] or len(segments) < 2:
                continue
            if not any(self._checks.cover(self._attachments.way(segment)) for segment in segments):
                continue
            pieces = pieces_of([i])
            sums = Sums([pieces.total])
            try:
                sum_pieces(pieces, trust(pieces), sums)
                codes[i] = MISMATCH if sums.found[0] != check.checksum else 0
            except TransferError as error:
                codes[i] = int(error.code)
            if codes[i] and now() >= deadline:
                codes[i] = int(ErrorCode.LEASE_EXPIRED)
            if codes[i]:
                damaged.append(i)
        return damaged

    def _sums_of(
        self, transport: str, share: "Sequence[_Cut | DiskCut]", lengths: list[int], checks: _Checks
    ) -> Sums | None:
        """To be taken of what is read of a share; None: of nothing."""
        if checks is None or not self._checks.cover(transport):
            return None
        return Sums(lengths) if any(checks[cut.value] is not None for cut in share) else None

    def _read_disk(
        self, segment: int, share: "list[_Cut]", pieces_of: PiecesOf, trust: Trust, checks: _Checks
    ) -> list[int]:
        """Values that are on the disk of the server of `segment`: a code each."""
        cuts = []
        for cut in share:
            seq, *range_of = cut.ranges
            start, length = range_of if len(range_of) == 2 else (0, range_of[0])
            cuts.append(DiskCut(cut.value, seq, start, length))

        def copy(some: Sequence[DiskCut], ranges: list[int]) -> list[int]:
            vector = pieces_of([cut.value for cut in some])
            try:
                with self._attachments.use(segment) as transport:
                    sums = self._sums_of(transport.name, some, ranges[1::2], checks)
                    finish(transport.get_steps(ranges, vector, trust(vector), None, sums))
            except (TransferError, StoreError) as error:
                return [int(error.code)] * len(some)
            self._attachments.count(segment, vector.total)
            self._meter.disk_bytes += vector.total
            return _compared(some, sums, checks)

        try:
            return self._disks.read(segment, cuts, copy)
        except (TransferError, StoreError) as error:
            self._attachments.forget(segment)
            return [int(error.code)] * len(share)

    def _read_all(
        self,
        segment: int,
        ranges: list[int],
        vector: Pieces,
        located: Located,
        trust: Trust,
        wanted: Callable[[str], Sums | None] | None = None,
    ) -> Generator[None, None, int]:
        """`ranges` of a segment → `vector`: a code.  `wanted`: what sums to take, given the transport's name."""
        try:
            with self._attachments.use(segment) as transport:
                sums = None if wanted is None else wanted(transport.name)
                yield from transport.get_steps(ranges, vector, trust(vector), located.leased, sums)
        except TransferError as error:
            self._attachments.forget(segment)
            return int(error.code)
        except StoreError as error:
            return int(error.code)
        if now() >= located.deadline:
            return int(ErrorCode.LEASE_EXPIRED)
        self._attachments.count(segment, vector.total, read=True)
        return 0

    def _by_segment(self, left: dict[int, list[list[int]]]) -> "dict[int, list[_Cut]]":
        shares: dict[int, list[_Cut]] = {}
        for value, replicas in left.items():
            place = replicas[0]
            if len(place) == 3 or place[0] < 0:
                shares.setdefault(place[0], []).append(_Cut(value, None, place[1:]))
                continue
            runs = _runs(place)
            start = 0
            for segment, ranges in runs:
                length = sum(ranges[1::2])
                cut = None if len(runs) == 1 else (start, length)
                shares.setdefault(segment, []).append(_Cut(value, cut, ranges))
                start += length
        return shares

    def _distance(self, place: list[int]) -> int:
        if place[0] < 0:
            return ON_DISK
        return max(self._attachments.distance(place[at]) for at in range(0, len(place), 3))


def _only_segment(places: list[list[list[int]]]) -> int:
    """The segment in whose memory all values lie, each in one replica of one extent: nearly always.  0: they do not."""
    if not places:
        return 0
    segment = places[0][0][0]
    plain = segment > 0 and all(
        len(replicas) == 1 and len(place := replicas[0]) == 3 and place[0] == segment for replicas in places
    )
    return segment if plain else 0


def _compared(share: "Sequence[_Cut | DiskCut]", sums: Sums | None, checks: _Checks) -> list[int]:
    """A code each: of whole values, whether they are as they were put."""
    if sums is None or checks is None:
        return [0] * len(share)
    codes = []
    for cut, checksum in zip(share, sums.found, strict=True):
        check = checks[cut.value]
        is_whole = isinstance(cut, DiskCut) or cut.cut is None
        codes.append(MISMATCH if is_whole and check is not None and check.checksum != checksum else 0)
    return codes


class _Cut(NamedTuple):
    """A value, or (start, length) of it, at `ranges` of one segment."""

    value: int
    cut: tuple[int, int] | None
    ranges: list[int]


def _pieces(share: list[_Cut], pieces_of: PiecesOf) -> Pieces:
    if all(cut is None for _, cut, _ in share):
        return pieces_of([value for value, _, _ in share])
    parts = [pieces_of([value]) if cut is None else pieces_of([value]).part(*cut) for value, cut, _ in share]
    return Pieces(np.concatenate([p.addresses for p in parts]), np.concatenate([p.lengths for p in parts]))


def _runs(place: list[int]) -> list[tuple[int, list[int]]]:
    """A place by segment: (segment, flat ranges), in order."""
    runs: list[tuple[int, list[int]]] = []
    for at in range(0, len(place), 3):
        if not runs or runs[-1][0] != place[at]:
            runs.append((place[at], []))
        runs[-1][1].extend(place[at + 1 : at + 3])
    return runs


def slice_place(place: list[int], start: int, length: int) -> list[int]:
    """The place of bytes [start, start + length) of a value at `place`.  Of one on disk: [-segment, number, start,
    length]."""
    if place[0] < 0:
        return [*place[:2], start, length]
    out: list[int] = []
    for at in range(0, len(place), 3):
        segment, offset, size = place[at : at + 3]
        if start < size and length > 0:
            take = min(size - start, length)
            out += (segment, offset + start, take)
            length -= take
            start = 0
        else:
            start -= size
            start = max(start, 0)
    return out
