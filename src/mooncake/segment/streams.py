"""Serving a segment's bytes over tcp: a thread a stream, blocking calls that move megabytes each.

Reads leave straight from the mapping; writes arrive straight in it.  One request is a batch, with one acknowledgement.
"""

import contextlib
import logging
import socket
import struct
import threading
import time
from array import array
from typing import TYPE_CHECKING

from mooncake.errors import ErrorCode
from mooncake.rpc import frame
from mooncake.rpc.data_messages import Read, Standing, Write
from mooncake.rpc.disk_messages import Stage, Staged, Unstage
from mooncake.rpc.message import Message
from mooncake.rpc.messages import DECODERS, KINDS, PROTOCOL, Codes, Failure, Hello, Welcome, encode
from mooncake.rpc.porter import porter_for
from mooncake.security.secret import read_secret
from mooncake.segment.figures import Traffic
from mooncake.segment.owner import Owner
from mooncake.segment.writers import Writer
from mooncake.transfer import table
from mooncake.transfer.stream import receive, receive_new, tune
from mooncake.version import __version__

if TYPE_CHECKING:
    from mooncake.segment.disk.tier import Tier

logger = logging.getLogger("mooncake.segment")

MAX_STREAMS = 4096


class _RefusedError(Exception):
    """The request is not one we serve; the stream is closed after saying why."""


class Streams(threading.Thread):
    """Accepts streams on `listener`."""

    def __init__(self, listener: socket.socket, owner: Owner) -> None:
        super().__init__(name="mooncake-tcp-accept", daemon=True)
        self._listener = listener
        self._owner = owner
        self.tier: Tier | None = None
        self.traffic = Traffic()
        self._open = threading.BoundedSemaphore(MAX_STREAMS)
        self._porter = porter_for(read_secret(), self._welcome, self._start, self._open.release)

    def run(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError as error:  # no descriptor is left, or the peer is gone already
                logger.warning("cannot take a tcp stream now: %s", error)
                time.sleep(0.1)
                continue
            if not self._open.acquire(blocking=False):
                stream.close()
                continue
            if self._porter is None:
                self._start(stream)
            else:
                self._porter.take(stream)

    def _start(self, stream: socket.socket) -> None:
        try:
            threading.Thread(target=self._serve, args=(stream,), name="mooncake-tcp", daemon=True).start()
        except RuntimeError as error:
            logger.warning("no thread for a tcp stream: %s", error)
            stream.close()
            self._open.release()

    def _serve(self, stream: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the peer is gone already: the first read says so
            tune(stream)
        writer = self._owner.writers.add_stream(stream)
        self.traffic.opened += 1
        try:
            while True:
                request_id, message = _receive(stream)
                try:
                    self._answer(stream, writer, request_id, message)
                except _RefusedError as error:
                    self.traffic.failed += 1
                    failure = Failure(ErrorCode.INVALID_PARAMS, str(error))
                    _reply(stream, request_id, message, failure, frame.FAILED)
                    return
        except (
            OSError,
            EOFError,
            frame.FramingError,
            ValueError,
            struct.error,
        ) as error:  # (msgspec's are ValueErrors)
            if not isinstance(error, EOFError):
                self.traffic.failed += 1
                logger.debug("a tcp stream ended: %s", error)
        finally:
            stream.close()
            self._owner.writers.remove(writer)
            self.traffic.closed += 1
            self._open.release()

    def _answer(self, stream: socket.socket, writer: Writer, request_id: int, message: Message) -> None:
        if isinstance(message, Hello):
            _reply(stream, request_id, message, self._welcome())
        elif isinstance(message, Read):
            self._read(stream, request_id, message)
        elif isinstance(message, Write):
            self._write(stream, writer, request_id, message)
        elif isinstance(message, Stage):
            _reply(stream, request_id, message, self._stage(message))
        elif isinstance(message, Standing):
            here = message.segment == self._owner.segment
            gone = [int(ErrorCode.SEGMENT_NOT_FOUND)] * len(message.slots)
            _reply(stream, request_id, message, Codes(self._owner.standing(message) if here else gone))
        elif isinstance(message, Unstage):
            if self.tier is not None:
                self.tier.staging.give_back(message.tickets)
        else:
            raise _RefusedError(f"{type(message).__name__} is not a request of the data port")

    def _welcome(self) -> Welcome:
        records = self._owner.memory.table
        return Welcome(PROTOCOL, __version__, records.term, records.lease_ms, self._owner.segment)

    def _stage(self, message: Stage) -> Staged:
        if self.tier is None or message.segment != self._owner.segment:
            return Staged(0, 0, [int(ErrorCode.SEGMENT_NOT_FOUND)] * len(message.seqs))
        return self.tier.stage(message)

    def _read(self, stream: socket.socket, request_id: int, message: Read) -> None:
        memory = self._owner.memory
        if message.segment != self._owner.segment:
            _reply(stream, request_id, message, Codes([ErrorCode.SEGMENT_NOT_FOUND]))
            return
        _check_ranges(message.ranges, memory.size)
        sent = time.clock_gettime(time.CLOCK_BOOTTIME) - message.age_us / 1e6
        if message.term and not memory.table.honours(message.term, sent):
            _reply(stream, request_id, message, Codes([ErrorCode.LEASE_EXPIRED]))
            return
        _reply(stream, request_id, message, Codes([0]), more=True)
        started = time.monotonic()
        for at in range(0, len(message.ranges), 2):
            offset, length = message.ranges[at], message.ranges[at + 1]
            memory.send(stream, offset, length)
        self.traffic.read(sum(message.ranges[1::2]), time.monotonic() - started)

    def _write(self, stream: socket.socket, writer: Writer, request_id: int, message: Write) -> None:
        """Every record's bytes are read off the stream, also of those that may not be written."""
        memory = self._owner.memory
        records = memory.table
        for record in message.records:
            _check_ranges(record.body.extents, memory.size)
            if not record.slots or not all(0 <= slot < records.slots for slot in record.slots):
                raise _RefusedError(f"slots {record.slots} are not in the table of {records.slots}")
        if message.segment != self._owner.segment:
            raise _RefusedError(f"segment {message.segment:#x} is not served here, but {self._owner.segment:#x}")
        started = time.monotonic()
        codes = []
        done = 0
        try:
            for record in message.records:
                extents = record.body.extents
                slot = record.slots[0]
                allowed = records.may_write(slot, record.seq, message.term)
                if allowed:
                    records.begin(record.slots, record.seq, message.term, writer.number, record.body)
                    table.fence()
                    allowed = records.may_write(slot, record.seq, message.term)
                if not allowed:
                    records.abandon(slot, record.seq)
                for at in range(0, len(extents), 2):
                    if allowed:
                        memory.receive(stream, extents[at], extents[at + 1])
                    else:
                        _discard(stream, extents[at + 1])
                if allowed and not message.summed:
                    records.set_state(slot, table.COMPLETE)
                codes.append(0 if allowed else int(ErrorCode.INVALID_WRITE))
                done += 1
            if message.summed:
                self._complete(stream, writer, message, codes)
        except (OSError, EOFError, ValueError, struct.error):
            for record in message.records[0 if message.summed else done : done + 1]:
                records.abandon(record.slots[0], record.seq)
            raise
        taken = sum(sum(record.body.extents[1::2]) for record in message.records)
        self.traffic.written(taken, time.monotonic() - started, sum(map(bool, codes)))
        _reply(stream, request_id, message, Codes(codes))

    def _complete(self, stream: socket.socket, writer: Writer, message: Write, codes: list[int]) -> None:
        """The bytes are in; now come the checksums, without which the records are not whole."""
        records = self._owner.memory.table
        checksums = array("Q", bytes(8 * len(codes)))
        receive(stream, memoryview(checksums).cast("B"))
        for record, code, checksum in zip(message.records, codes, checksums, strict=True):
            if not code:
                record.body.checksum = checksum
                records.begin(record.slots, record.seq, message.term, writer.number, record.body)
                records.set_state(record.slots[0], table.COMPLETE)


def _check_ranges(ranges: list[int], size: int) -> None:
    if len(ranges) % 2 or any(
        offset < 0 or length <= 0 or offset + length > size
        for offset, length in zip(ranges[::2], ranges[1::2], strict=True)
    ):
        raise _RefusedError(f"a range is outside the segment of {size} bytes")


def _receive(stream: socket.socket) -> tuple[int, Message]:
    header = bytearray(frame.HEADER_SIZE)
    receive(stream, memoryview(header))
    length, kind, _, request_id = frame.HEADER.unpack(header)
    if length > frame.MAX_BODY or kind not in DECODERS:
        raise frame.FramingError(f"kind {kind} with {length} bytes is not a message")
    return request_id, DECODERS[kind].decode(receive_new(stream, length))


def _discard(stream: socket.socket, length: int) -> None:
    scratch = memoryview(bytearray(min(length, 1 << 20)))
    while length:
        got = stream.recv_into(scratch[: min(length, len(scratch))])
        if not got:
            raise EOFError
        length -= got


def _reply(
    stream: socket.socket, request_id: int, request: Message, message: Message, flags: int = 0, more: bool = False
) -> None:
    data = frame.pack(KINDS[type(request)], frame.REPLY | flags, request_id, encode(message))
    with contextlib.suppress(BrokenPipeError):
        stream.sendall(data, socket.MSG_MORE if more else 0)
