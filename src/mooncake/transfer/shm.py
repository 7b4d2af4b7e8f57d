"""Same host: the segment's memory is mapped here, and a copy is a copy.  Nothing passes through its server.

Of a segment in a user's file only the table is mapped; its bytes are read and written by system calls.
"""

import contextlib
import ctypes
import socket
from collections.abc import Generator, Iterator

import msgspec

from mooncake.errors import ErrorCode, StoreError, TransferError
from mooncake.rpc import frame
from mooncake.rpc.client import Connection
from mooncake.rpc.data_messages import Attach, Attached, WriteRecord
from mooncake.rpc.messages import DECODERS, KINDS, PROTOCOL, Hello, SegmentInfo, encode
from mooncake.rpc.sockets import set_time_limit
from mooncake.security.secret import read_secret
from mooncake.transfer import table
from mooncake.transfer.base import Leased, Transport, merge
from mooncake.transfer.checksums import PENDING, Sums, checksum
from mooncake.transfer.file_memory import open_memory
from mooncake.transfer.file_room import FileRoom
from mooncake.transfer.memory import SegmentMemory
from mooncake.transfer.pieces import Pieces, pieces_of
from mooncake.transfer.room import Room
from mooncake.transfer.staging import sum_pieces
from mooncake.version import __version__

ATTACH_LIMIT = 1.0  # seconds


class ShmTransport(Transport):
    """`link` is the unix socket to the segment's server; its end means that the server is gone."""

    name = "shm"

    def __init__(self, memory: SegmentMemory, writer: int, link: socket.socket | None) -> None:
        self.memory = memory
        self.link = link
        self._writer = writer
        self._address = memory.address
        self._room: Room | FileRoom = (
            Room(memory.address, memory.data_fd, memory.size) if memory.address else FileRoom(memory)
        )

    def put_steps(
        self, term: int, records: list[WriteRecord], pieces: Pieces, trusted: bool, final: bool, summed: bool
    ) -> Generator[None, None, list[int]]:
        records_table = self.memory.table
        for record in records:
            if records_table.may_write(record.slots[0], record.seq, term):
                records_table.begin(record.slots, record.seq, term, self._writer, record.body)
        table.fence()
        codes = self._standing(term, records)
        try:
            with self._room.filling() as filling:
                if not any(codes):
                    filling.add(merge([x for record in records for x in record.body.extents]), pieces, trusted)
                else:
                    at = 0
                    for record, code in zip(records, codes, strict=True):
                        length = sum(record.body.extents[1::2])
                        if not code:
                            filling.add(merge(record.body.extents), pieces.part(at, length), trusted)
                        at += length
                if filling.go_on:
                    yield
            if summed:
                self._sum(term, records, codes, pieces, trusted)
        except BaseException:
            for record in records:
                records_table.abandon(record.slots[0], record.seq)
            raise
        for record, code in zip(records, codes, strict=True):
            if code:
                records_table.abandon(record.slots[0], record.seq)
            else:
                records_table.set_state(record.slots[0], table.COMPLETE)
        if final:
            table.fence()
            codes = [code or standing for code, standing in zip(codes, self._standing(term, records), strict=True)]
        return codes

    def _sum(self, term: int, records: list[WriteRecord], codes: list[int], pieces: Pieces, trusted: bool) -> None:
        """Find the checksums that are PENDING, and write those records again, in as many bytes: whoever reads one
        meanwhile sees a record as before."""
        at = 0
        for record, code in zip(records, codes, strict=True):
            body = record.body
            length = sum(body.extents[1::2])
            if body.checksum == PENDING and not code:
                if self._address:
                    body.checksum = checksum(
                        self.memory.data[offset : offset + n] for offset, n in _pairs(body.extents)
                    )
                else:
                    sums = Sums([length])
                    sum_pieces(pieces.part(at, length), trusted, sums)
                    body.checksum = sums.found[0]
                self.memory.table.begin(record.slots, record.seq, term, self._writer, body)
            at += length

    def _standing(self, term: int, records: list[WriteRecord]) -> list[int]:
        """A code for each: 0 if its grant still stands."""
        records_table, refused = self.memory.table, int(ErrorCode.INVALID_WRITE)
        if records_table.term != term:
            return [refused] * len(records)
        is_granted = records_table.is_granted
        return [0 if is_granted(record.slots[0], record.seq) else refused for record in records]

    def put_one(self, term: int, record: WriteRecord, address: int, trusted: bool) -> int:
        """As `put`, of one record with one extent whose bytes lie at one address.  Whole means here that the master
        that granted it, or whoever follows it, will find it so."""
        records = self.memory.table
        slot = record.slots[0]
        offset, length = record.body.extents
        if not records.may_write(slot, record.seq, term):
            return int(ErrorCode.INVALID_WRITE)
        records.begin(record.slots, record.seq, term, self._writer, record.body)
        table.fence()
        if not records.may_write(slot, record.seq, term):
            records.abandon(slot, record.seq)
            return int(ErrorCode.INVALID_WRITE)
        try:
            if trusted and self._address:
                ctypes.memmove(self._address + offset, address, length)
            else:
                self._room.fill([offset, length], pieces_of([address], [length]), trusted)
            if record.body.checksum == PENDING:
                self._sum(term, [record], [0], pieces_of([address], [length]), trusted)
        except BaseException:
            records.abandon(slot, record.seq)
            raise
        records.set_state(slot, table.COMPLETE)
        table.fence()
        return 0 if records.may_write(slot, record.seq, term) else int(ErrorCode.INVALID_WRITE)

    def get_one(self, offset: int, length: int, address: int, trusted: bool, leased: Leased) -> None:
        """As `get`, of one range to one address."""
        if not self.memory.table.honours(*leased):
            raise StoreError(ErrorCode.LEASE_EXPIRED)
        if trusted and self._address:
            ctypes.memmove(address, self._address + offset, length)
        else:
            self._room.empty([offset, length], pieces_of([address], [length]), trusted)

    def get_steps(
        self, ranges: list[int], pieces: Pieces, trusted: bool, leased: Leased | None, sums: Sums | None
    ) -> Generator[None, None, None]:
        if leased is not None and not self.memory.table.honours(*leased):
            raise StoreError(ErrorCode.LEASE_EXPIRED)
        with self._room.emptying() as emptying:
            emptying.add(merge(ranges), pieces, trusted)
            if emptying.go_on:
                yield
        if sums is not None:
            sum_pieces(pieces, trusted, sums)

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self._room.close()
        self.memory.close()


def _pairs(extents: list[int]) -> Iterator[tuple[int, int]]:
    """(offset, length) of each."""
    return zip(extents[0::2], extents[1::2], strict=True)


def attach(info: SegmentInfo) -> ShmTransport | None:
    """A mapping of the segment, or None where its server's unix socket cannot be reached: another host.  Raises
    TransferError if the server is there and silent.

    That the descriptors arrive, and that the table behind them names the segment, proves that it is this host.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    set_time_limit(link, ATTACH_LIMIT)
    try:
        link.connect("\0" + info.unix[1:] if info.unix.startswith("@") else info.unix)
        if read_secret() is not None:
            Connection(link).greet(Hello(PROTOCOL, __version__, "client", "", ""))
        link.sendall(frame.pack(KINDS[Attach], frame.REQUEST, 1, encode(Attach(info.segment))))
        data, descriptors, _, _ = socket.recv_fds(link, 4096, 2)
        answer = frame.FrameReader().feed(data)
        if len(descriptors) != 2 or not answer:
            raise TransferError("no descriptors came")
        attached = DECODERS[KINDS[Attached]].decode(answer[0].body)
        assert isinstance(attached, Attached)
        memory = open_memory(descriptors[0], descriptors[1], attached.size, attached.file)
        memory.table.check(info.segment)
    except BlockingIOError:  # its server is on this host, but stopped or stuck: no other way would lead there
        link.close()
        raise TransferError(f"the server of segment {info.name} does not answer") from None
    except (OSError, ValueError, StoreError, msgspec.MsgspecError, frame.FramingError):
        link.close()
        return None
    with contextlib.suppress(OSError):
        link.setblocking(False)
    return ShmTransport(memory, attached.writer, link)
