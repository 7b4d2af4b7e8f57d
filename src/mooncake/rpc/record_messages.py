"""Where a part of a value lies, and what is written down of it (see `rpc.messages`)."""

from mooncake.rpc.message import Message


class Part(Message):
    """A run of extents of one replica in one segment, and the table slots of its record."""

    segment: int
    slots: list[int]
    extents: list[int]  # offset, length, offset, length, ...


class Body(Message):
    """What one table record says of its part."""

    key: str
    size: int  # of the whole value
    extents: list[int]
    replica: int = 0
    part: int = 0
    parts: int = 1
    group: str = ""
    hard_pin: bool = False
    soft_pin_since: float = 0.0  # seconds since the epoch, 0: none
    soft_pin_ttl_ms: int | None = None  # None: as long as the master says
    data_type: int = 0
    client: str = ""
    private: bool = False  # key and group start with their tenant's scope (see master.tenants)
    version: int = 0  # the value's sequence number if the record is a later copy with one of its own
    from_disk: int = 0  # number of the copy on disk that this one was promoted from
    checksum: int = 0  # of the whole value (see transfer.checksums), 0: none


class Damaged(Message):
    """Client → master: what was read of these keys' replicas, at `places`, was not what `checksums` say.  They are
    dropped.  Reply Codes."""

    keys: list[str]
    checksums: list[int]
    places: list[list[int]]
