"""Reading values that are only on disk: their segment's server stages some, we copy these as from any segment.

Two requests are on their way at once, on a stream each, so that the disk reads while bytes are checked and copied.
What comes first is copied first: room that the server has lent to one request may be what the other waits for.  Staged
bytes are lent for a while: what was not copied by then, counted from when the request was sent, is read again."""

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

from mooncake.client.attachments import Attachments
from mooncake.errors import ErrorCode, TransferError
from mooncake.rpc import frame
from mooncake.rpc.client import Connection
from mooncake.rpc.disk_messages import Stage, Staged, Unstage
from mooncake.rpc.messages import KINDS, Hello, encode
from mooncake.transfer.stream import STALL_LIMIT, send
from mooncake.transfer.stream_pool import BROKEN, MAX_STREAMS, StreamPool, receive_reply, send_message

STEP = 8 << 20  # bytes of values that are staged at once
_STEP_VALUES = 1024
_MARGIN = 0.02  # of the time that staged bytes are lent for
_BLOCK = 4096
_BUSY = int(ErrorCode.OBJECT_REPLICA_BUSY)
_FAILED = int(ErrorCode.TRANSFER_FAIL)


def _now() -> float:
    """Seconds on a clock that goes on through suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class DiskCut(NamedTuple):
    """Bytes [start, start + length) of the value `seq`; `value` is the caller's number."""

    value: int
    seq: int
    start: int
    length: int


Copy = Callable[[Sequence[DiskCut], list[int]], list[int]]
"""Copies these cuts from ranges (flat: offset, length, ...) of the segment; a code each."""


class DiskReads:
    """Streams to the servers that have disks, by segment."""

    def __init__(self, attachments: Attachments, hello: Hello, limit: float) -> None:
        self._attachments = attachments
        self._hello = hello
        self._limit = limit
        self._pairs = threading.BoundedSemaphore(MAX_STREAMS // 2)  # else all might have one stream and want another
        self._pools: dict[str, StreamPool] = {}
        self._lock = threading.Lock()
        self.reads = 0

    def read(self, segment: int, cuts: list[DiskCut], copy: Copy) -> list[int]:
        """Have `copy` copy all cuts; a code each.  Raises TransferError, StoreError."""
        info = self._attachments.info(segment)
        if info is None:
            raise TransferError(f"segment {segment:#x} is not mounted any more")
        with self._lock:
            self.reads += 1
        reading = _Reading(segment, cuts, copy, self._limit)
        pool = self._pool(info.tcp)
        if reading.is_short:
            pool.exchange(lambda stream: reading.run([stream]))
        else:
            with self._pairs:
                pool.exchange(lambda one: pool.exchange(lambda other: reading.run([one, other])))
        return reading.codes

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _pool(self, endpoint: str) -> StreamPool:
        with self._lock:
            pool = self._pools.get(endpoint)
            if pool is None:
                self._pools = {name: pool for name, pool in self._pools.items() if not pool.unused}  # of servers gone
                pool = self._pools[endpoint] = StreamPool(endpoint, self._hello, self._limit)
            return pool


class _Asked(NamedTuple):
    """A request on its way on `stream`."""

    stream: Connection
    cuts: list[DiskCut]
    seqs: list[int]
    sent: float


class _Reading:
    """One batch.  `limit`: seconds without progress."""

    def __init__(self, segment: int, cuts: list[DiskCut], copy: Copy, limit: float) -> None:
        self._segment = segment
        self._copy = copy
        self._limit = limit
        self._give_up = _now() + limit
        self._left = deque(_steps(cuts))
        self._at = {cut.value: i for i, cut in enumerate(cuts)}
        self.codes = [0] * len(cuts)

    @property
    def is_short(self) -> bool:
        """Whether one request is enough."""
        return len(self._left) < 2

    def run(self, streams: list[Connection]) -> None:
        """Read everything.  Raises TransferError: the streams are of no use any more then."""
        try:
            self._run(streams)
        except BROKEN as error:
            raise TransferError(f"values could not be read from disk: {error}") from error

    def _run(self, streams: list[Connection]) -> None:
        poll = select.poll()
        asked: dict[int, _Asked] = {}
        for stream in streams:
            poll.register(stream.sock, select.POLLIN)
            self._ask(stream, asked)
        while asked:
            ready = poll.poll(STALL_LIMIT * 1e3)
            if not ready:
                raise TransferError(f"the server of values on disk has stalled for {STALL_LIMIT:.0f} s")
            for descriptor, _ in ready:
                request = asked.pop(descriptor, None)
                if request is None:
                    raise EOFError("a stream ended")
                staged = cast(Staged, receive_reply(request.stream.sock))
                again = self._take(request, staged)
                if staged.ticket:
                    _send_one_way(request.stream, Unstage([staged.ticket]))
                if again:
                    self._left.append(again)
                self._ask(request.stream, asked)

    def _ask(self, stream: Connection, asked: dict[int, _Asked]) -> None:
        """For the next step, if one is left."""
        if self._left:
            cuts = self._left.popleft()
            seqs = list(dict.fromkeys(cut.seq for cut in cuts))
            asked[stream.sock.fileno()] = _Asked(stream, cuts, seqs, _now())
            send_message(stream.sock, Stage(self._segment, seqs))

    def _take(self, asked: _Asked, staged: Staged) -> list[DiskCut]:
        """Copy what is staged; the cuts that must be asked for again."""
        offsets = dict(zip(asked.seqs, staged.offsets, strict=True))
        there: list[DiskCut] = []
        ranges: list[int] = []
        again: list[DiskCut] = []
        for cut in asked.cuts:
            offset = offsets[cut.seq]
            if offset >= 0:
                there.append(cut)
                ranges += (offset + cut.start, cut.length)
            elif offset == _BUSY and _now() < self._give_up:
                again.append(cut)
            else:
                self._set([cut], _FAILED if offset == _BUSY else offset)
        if there:
            codes = self._copy(there, ranges)
            lent = staged.ttl_ms / 1e3 * (1 - _MARGIN)
            if _FAILED not in codes and _now() >= asked.sent + lent:
                if _now() < self._give_up:
                    return again + there
                codes = [int(ErrorCode.LEASE_EXPIRED)] * len(there)
            for cut, code in zip(there, codes, strict=True):
                self._set([cut], code)
        return again

    def _set(self, cuts: list[DiskCut], code: int) -> None:
        self._give_up = _now() + self._limit
        for cut in cuts:
            self.codes[self._at[cut.value]] = code


def _steps(cuts: list[DiskCut]) -> Iterator[list[DiskCut]]:
    """Cut a batch into what is asked for at once."""
    step: list[DiskCut] = []
    length = 0
    seen: set[int] = set()
    for cut in cuts:
        size = -(-(cut.start + cut.length) // _BLOCK) * _BLOCK  # at least
        more = 0 if cut.seq in seen else size
        if step and (length + more > STEP or len(step) >= _STEP_VALUES):
            yield step
            step, length, seen, more = [], 0, set(), size
        step.append(cut)
        seen.add(cut.seq)
        length += more
    if step:
        yield step


def _send_one_way(stream: Connection, message: Unstage) -> None:
    data = frame.pack(KINDS[type(message)], frame.ONE_WAY, 0, encode(message))
    send(stream.sock, memoryview(data))
