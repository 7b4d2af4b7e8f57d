"""The put pipeline: room for a batch (one call) → records and bytes into segments → tell the master (one call)."""

import contextlib
import time
from collections.abc import Callable, Generator, Sequence

import numpy as np

from mooncake.client.attachments import Attachments
from mooncake.client.checks import Checks
from mooncake.client.meter import Meter
from mooncake.errors import ErrorCode, StoreError, TransferError, UnsoundError
from mooncake.rpc.client import Client
from mooncake.rpc.data_messages import WriteRecord
from mooncake.rpc.messages import Codes, Grant, Kept, PutEnd, PutOptions, PutStart, PutStarted
from mooncake.rpc.record_messages import Body, Part
from mooncake.transfer.checksums import NONE, PENDING, Sums
from mooncake.transfer.pieces import Pieces, pieces_of
from mooncake.transfer.staging import sum_pieces
from mooncake.transfer.steps import finish

PiecesOf = Callable[[Sequence[int]], Pieces]
"""Gives the pieces of some of a batch's values (by index, in that order), one after another."""

Trust = Callable[[Pieces], bool]
"""Whether all these addresses are known to be valid."""


EAGER = 1 << 20  # bytes: single values up to here do not wait for the reply to PutEnd ...
EAGER_LIMIT = 0.5  # seconds: ... if PutStart was so short a time ago that the master cannot have discarded them
_PLAIN = PutOptions()


class _Share:
    """What of a batch goes into one segment."""

    def __init__(self) -> None:
        self.records: list[WriteRecord] = []
        self.values: list[int] = []  # index in the batch, a record
        self.replicas: list[int] = []
        self.cuts: list[tuple[int, int]] = []  # (start, length) within the value
        self.whole = True

    def add(self, record: WriteRecord, value: int, replica: int, start: int, length: int) -> None:
        self.records.append(record)
        self.values.append(value)
        self.replicas.append(replica)
        self.cuts.append((start, length))

    def await_sums(self) -> bool:
        """Have the checksums found out that are not known yet; whether there are any."""
        lacking = [record.body for record in self.records if not record.body.checksum and record.body.parts == 1]
        for body in lacking:
            body.checksum = PENDING
        return bool(lacking)


class PutPipeline:
    def __init__(self, rpc: Client, attachments: Attachments, client_id: str, meter: Meter, checks: Checks) -> None:
        self._checks = checks
        self._rpc = rpc
        self._attachments = attachments
        self._client_id = client_id
        self._meter = meter

    def put_steps(
        self,
        keys: list[str],
        sizes: list[int],
        pieces_of: PiecesOf,
        options: PutOptions | None,
        trust: Trust,
        prepare: Callable[[], None] = lambda: None,
        eager: bool = False,
    ) -> Generator[None, None, list[int]]:
        """Store a batch; a code a key (0 or negative).  Sizes are bytes, > 0.  What `pieces_of` needs is prepared while
        the master looks for room.  `eager`: it ends within milliseconds, and the reply to PutEnd need not be waited for
        (as with small single values)."""
        started_at = time.monotonic()
        codes = yield from self._put_steps(keys, sizes, pieces_of, options, trust, prepare, eager, started_at)
        self._meter.put(codes, self._meter.batch_put_time, time.monotonic() - started_at)
        return codes

    def _put_steps(
        self,
        keys: list[str],
        sizes: list[int],
        pieces_of: PiecesOf,
        options: PutOptions | None,
        trust: Trust,
        prepare: Callable[[], None],
        eager: bool,
        started_at: float,
    ) -> Generator[None, None, list[int]]:
        try:
            asked = self._rpc.begin(PutStart(keys, sizes, options, eager), PutStarted)
            yield
            prepare()
            yield
            started = asked()
        except StoreError as error:
            return [int(error.code)] * len(keys)
        codes = [grant if isinstance(grant, int) else 0 for grant in started.grants]
        granted = {i: grant for i, grant in enumerate(started.grants) if isinstance(grant, Grant)}
        if not granted:
            return codes
        sums: dict[int, int] = {}
        try:
            bad = yield from self._write(keys, sizes, granted, started, pieces_of, options, trust, sums, eager)
        except UnsoundError as error:  # nothing has been written
            bad = _all_bad(granted, int(error.code))
        except BaseException:
            self._finish(granted, _all_bad(granted, int(ErrorCode.INTERNAL_ERROR)), codes, sums)
            raise
        if eager and not bad and time.monotonic() - started_at < EAGER_LIMIT and self._are_mapped(granted):
            with contextlib.suppress(StoreError):
                self._rpc.post(
                    PutEnd([grant.seq for grant in granted.values()], checksums=_listed(sums, list(granted)))
                )
                return codes
        self._finish(granted, bad, codes, sums)
        return codes

    # -- in several calls (see client.sessions)

    def start(self, keys: list[str], sizes: list[int], options: PutOptions | None) -> PutStarted:
        """Ask for room.  Raises StoreError."""
        return self._rpc.call(PutStart(keys, sizes, options), PutStarted)

    def complete(
        self,
        keys: list[str],
        sizes: list[int],
        grants: list[Grant],
        started: PutStarted,
        pieces_of: PiecesOf,
        options: PutOptions | None,
    ) -> list[int]:
        """Write what room was granted for, as `started` says, from memory that is known to be mapped; a code a key."""
        granted, codes = dict(enumerate(grants)), [0] * len(keys)
        sums: dict[int, int] = {}
        started_at = time.monotonic()
        try:
            bad = finish(self._write(keys, sizes, granted, started, pieces_of, options, lambda _: True, sums))
        except BaseException:
            self._finish(granted, _all_bad(granted, int(ErrorCode.INTERNAL_ERROR)), codes, sums)
            raise
        self._finish(granted, bad, codes, sums)
        self._meter.put(codes, self._meter.batch_put_time, time.monotonic() - started_at)
        return codes

    def give_up(self, seqs: list[int]) -> list[int]:
        """Nothing will be written into this room; a code each."""
        try:
            return self._rpc.call(PutEnd([], seqs), Codes).codes
        except StoreError as error:
            return [int(error.code)] * len(seqs)

    def put_one(self, key: str, size: int, address: int, options: PutOptions | None, trusted: bool) -> int:
        """As `put`, of one value at one address: short cuts for what is small and on this host."""
        started_at = time.monotonic()
        code = self._put_one(key, size, address, options, trusted, started_at)
        self._meter.put((code,), self._meter.put_time, time.monotonic() - started_at)
        return code

    # -- inside

    def _are_mapped(self, granted: dict[int, Grant]) -> bool:
        """Whether all went into memory that is mapped here: only then is it known to be final."""
        segments = {part.segment for grant in granted.values() for parts in grant.replicas for part in parts}
        return all(self._attachments.distance(segment) < 2 for segment in segments)

    def _put_one(
        self, key: str, size: int, address: int, options: PutOptions | None, trusted: bool, started_at: float
    ) -> int:
        eager = size <= EAGER
        try:
            started = self._rpc.call(PutStart([key], [size], options, eager), PutStarted)
        except StoreError as error:
            return int(error.code)
        grant = started.grants[0]
        if isinstance(grant, int):
            return grant
        part = grant.replicas[0][0]
        if len(grant.replicas) > 1 or len(grant.replicas[0]) > 1 or len(part.extents) > 2:
            mapped = None
        else:
            mapped = self._attachments.enter_mapped(part.segment)
        codes = [0]
        sums: dict[int, int] = {}
        if mapped is None:
            pieces = pieces_of([address], [size])
            steps = self._write([key], [size], {0: grant}, started, lambda _: pieces, options, lambda _: trusted, sums)
            bad = finish(steps)
        else:
            attachment, transport = mapped
            body = self._body(
                key, size, [part.extents[0], size], 0, 0, 1, options or _PLAIN, 0, grant.kept, started.scope
            )
            if self._checks.cover(transport.name):
                body.checksum = PENDING
            try:
                code = transport.put_one(started.term, WriteRecord(part.slots, grant.seq, body), address, trusted)
            except TransferError as error:
                code = int(error.code)
            finally:
                attachment.leave()
            if not code:
                sums[0] = body.checksum
                self._attachments.count(part.segment, size)
                if eager and time.monotonic() - started_at < EAGER_LIMIT:
                    with contextlib.suppress(StoreError):
                        self._rpc.post(PutEnd([grant.seq], checksums=_listed(sums, [0])))
                        return 0
            bad = {(0, 0): code} if code else {}
        self._finish({0: grant}, bad, codes, sums)
        return codes[0]

    def _body(
        self,
        key: str,
        size: int,
        extents: list[int],
        replica: int,
        part: int,
        parts: int,
        options: PutOptions,
        index: int,
        kept: Kept | None,
        scope: str,
    ) -> Body:
        soft_pin_ms = options.soft_pin_ttl_ms
        soft_pinned = options.soft_pin_action == 1
        if kept is not None and kept.soft_pin_ms and not soft_pinned:
            soft_pinned, soft_pin_ms = True, kept.soft_pin_ms
        group = scope + options.groups[index] if options.groups and options.groups[index] else ""
        if not options.groups and kept is not None:
            group = kept.group
        return Body(
            scope + key,
            size,
            extents,
            replica,
            part,
            parts,
            group,
            options.hard_pin or (kept is not None and kept.hard_pin),
            time.time() if soft_pinned else 0.0,
            soft_pin_ms if soft_pinned else None,
            options.data_type,
            self._client_id,
            bool(scope),
        )

    def _write(
        self,
        keys: list[str],
        sizes: list[int],
        granted: dict[int, Grant],
        started: PutStarted,
        pieces_of: PiecesOf,
        options: PutOptions | None,
        trust: Trust,
        sums: dict[int, int],
        final: bool = False,
    ) -> Generator[None, None, dict[tuple[int, int], int]]:
        """Fill the granted room; (index, replica) → code of what failed.  `sums`: gets the checksums, by index."""
        shares: dict[int, _Share] = {}
        options = options or _PLAIN
        scope = started.scope
        for i, grant in granted.items():
            size = sizes[i]
            if self._checks.on and (len(grant.replicas) > 1 or len(grant.replicas[0]) > 1):
                sums[i] = self._sum(grant, size, pieces_of([i]), trust)
            for replica, parts in enumerate(grant.replicas):
                start = 0
                for number, part in enumerate(parts):
                    extents = _exact(part, size, start, number == len(parts) - 1)
                    length = extents[1] if len(extents) == 2 else sum(extents[1::2])
                    share = shares.get(part.segment)
                    if share is None:
                        share = shares[part.segment] = _Share()
                    body = self._body(
                        keys[i], size, extents, replica, number, len(parts), options, i, grant.kept, scope
                    )
                    body.checksum = sums.get(i, NONE)
                    share.add(WriteRecord(part.slots, grant.seq, body), i, replica, start, length)
                    share.whole = share.whole and length == size
                    start += length
        bad: dict[tuple[int, int], int] = {}
        for segment, share in shares.items():
            filled = yield from self._fill(segment, share, started.term, pieces_of, trust, final)
            for value, replica, code in zip(share.values, share.replicas, filled, strict=True):
                if code:
                    bad[value, replica] = code
            if self._checks.on:
                for value, record, code in zip(share.values, share.records, filled, strict=True):
                    if record.body.checksum and not code:
                        sums[value] = record.body.checksum
        return bad

    def _sum(self, grant: Grant, size: int, pieces: Pieces, trust: Trust) -> int:
        """The checksum of a value that goes to several places; NONE if none of them asks for one."""
        places = {part.segment for parts in grant.replicas for part in parts}
        if not any(self._checks.cover(self._attachments.way(segment)) for segment in places):
            return NONE
        sums = Sums([size])
        try:
            sum_pieces(pieces, trust(pieces), sums)
        except TransferError:  # and so will its copies
            return NONE
        return sums.found[0]

    def _fill(
        self, segment: int, share: _Share, term: int, pieces_of: PiecesOf, trust: Trust, final: bool
    ) -> Generator[None, None, list[int]]:
        pieces = pieces_of(share.values) if share.whole else _cut(share, pieces_of)
        try:
            with self._attachments.use(segment) as transport:
                summed = self._checks.cover(transport.name) and share.await_sums()
                codes = yield from transport.put_steps(term, share.records, pieces, trust(pieces), final, summed)
        except TransferError as error:
            self._attachments.forget(segment)
            return [int(error.code)] * len(share.records)
        self._attachments.count(segment, pieces.total)
        return codes

    def _finish(
        self, granted: dict[int, Grant], bad: dict[tuple[int, int], int], codes: list[int], sums: dict[int, int]
    ) -> None:
        """Tell the master what has become whole; fills `codes` in."""
        done, failed, lost = list(granted), [], []
        if bad:
            done = []
            for i, grant in granted.items():
                bad_replicas = [replica for replica in range(len(grant.replicas)) if (i, replica) in bad]
                if len(bad_replicas) == len(grant.replicas):
                    failed.append(i)
                    codes[i] = bad[i, 0]
                    continue
                done.append(i)
                lost += [x for replica in bad_replicas for x in (grant.seq, replica)]
        message = PutEnd([granted[i].seq for i in done], [granted[i].seq for i in failed], lost, _listed(sums, done))
        try:
            answers = self._rpc.call(message, Codes).codes
        except StoreError as error:
            answers = [int(error.code)] * len(done)
        for i, code in zip(done, answers, strict=False):
            codes[i] = int(ErrorCode.RPC_FAIL) if code == ErrorCode.INVALID_WRITE else code


def _listed(sums: dict[int, int], values: list[int]) -> list[int]:
    """The checksums of these values; empty if there are none."""
    return [sums.get(value, NONE) for value in values] if any(sums.values()) else []


def _all_bad(granted: dict[int, Grant], code: int) -> dict[tuple[int, int], int]:
    return {(i, number): code for i, grant in granted.items() for number in range(len(grant.replicas))}


def _exact(part: Part, size: int, start: int, last: bool) -> list[int]:
    """A part's extents without the allocator's rounding: together they are the value's bytes."""
    if not last:
        return part.extents
    extents = part.extents
    if len(extents) == 2:
        return [extents[0], size - start]
    extents = list(extents)
    extents[-1] -= start + sum(extents[1::2]) - size
    return extents


def _cut(share: _Share, pieces_of: PiecesOf) -> Pieces:
    parts = [
        pieces_of([value]).part(start, length) for value, (start, length) in zip(share.values, share.cuts, strict=True)
    ]
    return Pieces(np.concatenate([p.addresses for p in parts]), np.concatenate([p.lengths for p in parts]))
