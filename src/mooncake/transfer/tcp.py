"""Other hosts, or forced: the segment's server moves the bytes for us over pooled streams.

A batch is one request and one acknowledgement.
"""

import math
import time
from array import array
from collections.abc import Generator

from mooncake.errors import ErrorCode, StoreError, TransferError
from mooncake.rpc.client import Connection
from mooncake.rpc.data_messages import Read, Write, WriteRecord
from mooncake.rpc.messages import Hello, SegmentInfo
from mooncake.transfer.base import Leased, Transport, merge
from mooncake.transfer.checksums import PENDING, Sums
from mooncake.transfer.pieces import Pieces
from mooncake.transfer.staging import receive_pieces, send_pieces
from mooncake.transfer.stream import send
from mooncake.transfer.stream_pool import StreamPool, receive_codes, send_message


class TcpTransport(Transport):
    """Streams to the server of one segment."""

    name = "tcp"

    def __init__(self, info: SegmentInfo, hello: Hello, limit: float) -> None:
        self._segment = info.segment
        self._endpoint = info.tcp
        self._streams = StreamPool(info.tcp, hello, limit)

    def put_steps(
        self, term: int, records: list[WriteRecord], pieces: Pieces, trusted: bool, final: bool, summed: bool
    ) -> Generator[None, None, list[int]]:
        yield from ()  # nothing goes on without this thread
        message = Write(self._segment, term, records, summed)
        sums = Sums([sum(record.body.extents[1::2]) for record in records]) if summed else None
        given = [record.body.checksum for record in records]

        def put(stream: Connection) -> list[int]:
            send_message(stream.sock, message)
            if sums is not None:
                sums.restart()
            send_pieces(stream.sock, pieces, trusted, sums=sums)
            if sums is not None:
                found = [old if old != PENDING else new for old, new in zip(given, sums.found, strict=True)]
                send(stream.sock, memoryview(array("Q", found).tobytes()))
            return receive_codes(stream.sock).codes

        codes = self._streams.exchange(put)
        if sums is not None:
            for record, new in zip(records, sums.found, strict=True):
                if record.body.checksum == PENDING:
                    record.body.checksum = new
        return codes

    def get_steps(
        self, ranges: list[int], pieces: Pieces, trusted: bool, leased: Leased | None, sums: Sums | None
    ) -> Generator[None, None, None]:
        yield from ()
        merged, segment = merge(ranges), self._segment

        def get(stream: Connection) -> int:
            age = 0.0 if leased is None else time.clock_gettime(time.CLOCK_BOOTTIME) - leased.sent
            message = Read(segment, merged, 0 if leased is None else leased.term, math.ceil(age * 1e6))
            send_message(stream.sock, message)
            code = receive_codes(stream.sock).codes[0]
            if not code:
                if sums is not None:
                    sums.restart()
                receive_pieces(stream.sock, pieces, trusted, sums=sums)
            return code

        code = self._streams.exchange(get)
        if code == ErrorCode.LEASE_EXPIRED:
            raise StoreError(ErrorCode.LEASE_EXPIRED)
        if code:
            raise TransferError(f"{self._endpoint} does not serve that segment any more ({ErrorCode(code).name})")

    @property
    def refusing(self) -> bool:
        """Whether the peer is known to be out of reach now."""
        return self._streams.refusing

    def close(self) -> None:
        self._streams.close()
