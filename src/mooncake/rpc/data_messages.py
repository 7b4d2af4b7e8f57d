"""The part of the protocol that moves bytes between a client and a segment server (see `rpc.messages`)."""

from mooncake.rpc.message import Message
from mooncake.rpc.record_messages import Body


class Attach(Message):
    """On the unix socket.  The reply, Attached, carries the descriptors of the memory and of the table."""

    segment: int


class Attached(Message):
    """`writer` names this connection in WRITING records; the segment is `size` bytes, its table `table_size`.
    `file`: it lies in a user's file, from there on, and is not to be mapped; -1: in memory."""

    writer: int
    size: int
    table_size: int
    file: int = -1


class Read(Message):
    """`ranges` (flat: offset, length, ...) of one segment.  The reply, Codes, is followed by their bytes unless it is
    an error.  `term` of the master that leased them, and how long ago it was asked; 0: it is told afterwards
    whether that was allowed, or this server has staged it."""

    segment: int
    ranges: list[int]
    term: int
    age_us: int


class Standing(Message):
    """Are the records `seq` in `slots` still what they were under the master of `term`, so that bytes that were read
    before this was asked are theirs?  Reply Codes: one a slot, 0 or REPLICA_IS_GONE."""

    segment: int
    term: int
    slots: list[int]
    seq: int


class WriteRecord(Message):
    slots: list[int]
    seq: int
    body: Body


class Write(Message):
    """The bytes of all records' extents, in order, follow this message; after them, if `summed`, the checksum of each
    record's value (u64, little endian).  Reply Codes: one a record."""

    segment: int
    term: int
    records: list[WriteRecord]
    summed: bool = False
