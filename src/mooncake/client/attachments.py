"""Which segments this process can reach, and how: attached when first needed, let go when their server is gone."""

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mooncake.errors import ErrorCode, StoreError, TransferError
from mooncake.rpc.client import Client
from mooncake.rpc.messages import Hello, SegmentInfo, SegmentList, SegmentQuery
from mooncake.transfer.base import Transport
from mooncake.transfer.shm import ShmTransport, attach
from mooncake.transfer.tcp import TcpTransport

logger = logging.getLogger("mooncake.client")


class Attachment:
    """A reachable segment.  It is closed when it is dropped *and* nobody is moving bytes."""

    def __init__(self, info: SegmentInfo, transport: Transport, own: bool) -> None:
        self.info = info
        self.transport = transport
        self.own = own
        self._users = 0
        self._dropped = False
        self._lock = threading.Lock()

    def enter(self) -> bool:
        with self._lock:
            if self._dropped:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._dropped and self._users == 0
        if last:
            self.transport.close()

    def drop(self) -> None:
        with self._lock:
            if self._dropped:
                return
            self._dropped = True
            idle = self._users == 0
        if idle:
            self.transport.close()


class Attachments:
    """All of them, by segment."""

    def __init__(self, rpc: Client, hello: Hello, force_tcp: bool, limit: float) -> None:
        self._rpc = rpc
        self._hello = hello
        self._force_tcp = force_tcp
        self._limit = limit
        self._by_segment: dict[int, Attachment] = {}
        self._lock = threading.Lock()
        self._watch: _Watch | None = None
        self._closed = False
        self._turns: dict[int, threading.Lock] = {}  # of segments that are being attached
        self._refused: dict[int, float] = {}  # until when not to try again
        self.moved: dict[str, int] = {"local": 0, "shm": 0, "tcp": 0}  # bytes, by transport
        self.read = dict(self.moved)  # of those, what gets brought

    def add_own(self, info: SegmentInfo, transport: ShmTransport) -> None:
        self._by_segment[info.segment] = Attachment(info, transport, own=True)

    def remove_own(self, segment: int) -> None:
        """It is no longer in the pool."""
        with self._lock:
            attachment = self._by_segment.pop(segment, None)
        if attachment is not None:
            attachment.drop()

    def info(self, segment: int) -> SegmentInfo | None:
        """What is known of a segment, asking the master if need be.  None: not mounted any more."""
        known = self._by_segment.get(segment)
        if known is not None:
            return known.info
        listed = self._rpc.call(SegmentQuery([segment]), SegmentList).segments
        return listed[0] if listed else None

    def distance(self, segment: int) -> int:
        """0 own, 1 mapped, 2 unknown yet, 3 over the network: what a replica there costs to read."""
        known = self._by_segment.get(segment)
        if known is None:
            return 2
        if known.own:
            return 0
        return 1 if known.transport.name == "shm" else 3

    def way(self, segment: int) -> str:
        """The name of the transport to a segment; that of the farthest if it is not known yet."""
        known = self._by_segment.get(segment)
        return TcpTransport.name if known is None else known.transport.name

    @contextmanager
    def use(self, segment: int) -> Iterator[Transport]:
        """The transport to a segment, held open meanwhile.  Raises TransferError if it cannot be reached."""
        attachment = self._by_segment.get(segment)
        if attachment is None or not attachment.enter():
            attachment = self._attach(segment)
        try:
            yield attachment.transport
        finally:
            attachment.leave()

    def enter_mapped(self, segment: int) -> tuple[Attachment, ShmTransport] | None:
        """The attachment, entered (`leave` must follow), if its memory is mapped here already."""
        attachment = self._by_segment.get(segment)
        if attachment is not None:
            transport = attachment.transport
            if isinstance(transport, ShmTransport) and attachment.enter():
                return attachment, transport
        return None

    def count(self, segment: int, length: int, *, read: bool = False) -> None:
        known = self._by_segment.get(segment)
        if known is not None:
            name = "local" if known.own else known.transport.name
            self.moved[name] += length
            if read:
                self.read[name] += length

    def forget(self, segment: int) -> None:
        """A transfer failed: ask again next time.  Never the own one, nor one that is known to be out of reach now."""
        with self._lock:
            attachment = self._by_segment.get(segment)
            if attachment is None or attachment.own:
                return
            transport = attachment.transport
            if isinstance(transport, TcpTransport) and transport.refusing:
                return
            del self._by_segment[segment]
        attachment.drop()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            attachments, self._by_segment = list(self._by_segment.values()), {}
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        for attachment in attachments:
            attachment.drop()

    def _attach(self, segment: int) -> Attachment:
        """A newly attached segment, entered."""
        with self._lock:
            turn = self._turns.setdefault(segment, threading.Lock())
        with turn:  # who comes second finds what the first one found; other segments need not wait
            with self._lock:
                known = self._by_segment.get(segment)
                if known is not None and known.enter():
                    return known
            if time.monotonic() < self._refused.get(segment, 0.0):
                raise TransferError(f"segment {segment:#x} could not be reached a moment ago")
            started = time.monotonic()
            try:
                info = self._mounted(segment)
                attachment = Attachment(info, self._reach(info), own=False)
            except TransferError:
                self._refuse(segment, started)
                raise
            attachment.enter()
            with self._lock:
                self._turns.pop(segment, None)
                if self._closed:
                    attachment.drop()
                    attachment.leave()
                    raise TransferError("the store was closed")
                self._by_segment[segment] = attachment
                self._watch_over(segment, attachment.transport)
        logger.info("segment %s is reached by %s", info.name, attachment.transport.name)
        return attachment

    def _mounted(self, segment: int) -> SegmentInfo:
        try:
            info = self.info(segment)
        except StoreError as error:
            raise TransferError(str(error)) from None
        if info is None:
            raise TransferError(f"segment {segment:#x} is not mounted any more ({ErrorCode.SEGMENT_NOT_FOUND.name})")
        return info

    def _reach(self, info: SegmentInfo) -> Transport:
        transport: Transport | None = None if self._force_tcp else attach(info)
        if transport is not None:
            return transport
        try:
            return TcpTransport(info, self._hello, self._limit)
        except ValueError as error:
            raise TransferError(f"segment {info.name}: {error}") from None

    def _refuse(self, segment: int, started: float) -> None:
        """It could not be reached: for as long as finding that out took, calls fail at once."""
        now = time.monotonic()
        with self._lock:
            self._turns.pop(segment, None)
            self._refused = {number: until for number, until in self._refused.items() if until > now}
            self._refused[segment] = now + (now - started)

    def _watch_over(self, segment: int, transport: Transport) -> None:
        if isinstance(transport, ShmTransport) and transport.link is not None:
            if self._watch is None:
                self._watch = _Watch(self.forget)
            self._watch.add(transport.link.fileno(), segment)


class _Watch:
    """A thread that sleeps until a segment server's unix socket ends, and then lets its memory go: mappings of an
    owner that died hold its memory until they are undone."""

    def __init__(self, gone: Callable[[int], None]) -> None:
        self._gone = gone
        self._poll = select.poll()
        self._segments: dict[int, int] = {}
        self._wake_read, self._wake_write = os.pipe()
        self._poll.register(self._wake_read, select.POLLIN)
        self._stopped = False
        threading.Thread(target=self._run, name="mooncake-segment-watch", daemon=True).start()

    def add(self, descriptor: int, segment: int) -> None:
        self._segments[descriptor] = segment
        os.write(self._wake_write, b"a")

    def stop(self) -> None:
        self._stopped = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"s")

    def _run(self) -> None:
        polled: set[int] = set()
        while not self._stopped:
            for descriptor in set(self._segments) - polled:
                self._poll.register(descriptor, select.POLLIN | select.POLLHUP)
                polled.add(descriptor)
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake_read:
                    os.read(self._wake_read, 4096)
                    continue
                with contextlib.suppress(KeyError):
                    self._poll.unregister(descriptor)
                polled.discard(descriptor)
                segment = self._segments.pop(descriptor, None)
                if segment is not None:
                    self._gone(segment)
        os.close(self._wake_read)
        os.close(self._wake_write)
