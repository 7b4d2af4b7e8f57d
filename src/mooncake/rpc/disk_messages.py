"""The part of the protocol that is about values on disk (see `rpc.messages`)."""

from mooncake.rpc.message import Message
from mooncake.rpc.record_messages import Body, Part


class DiskSettings(Message):
    """How a segment server keeps values on disk.  Sizes are bytes; `quota` 0: as the master says; `file_limit`: after
    which a new file is begun; `ttl_ms`: how long a value waits in `staging` memory for its reader; `lru`: the file that
    was not read longest leaves first, not the oldest; `compaction`: bytes a second that may be moved out of files that
    are mostly dead, 0: none."""

    path: str
    staging: int
    quota: int
    keys_limit: int
    file_limit: int
    ttl_ms: int
    lru: bool
    compaction: int


class DiskMount(Message):
    """After Mount, on the segment's connection: its server has a tier too.  `tier` is a number that stays the same as
    long as the values on it do; `used` bytes of it are taken.  Reply DiskMounted; unless it says `resumed`, every
    record follows in DiskAnnounce messages, the last one marked."""

    segment: int
    tier: int
    used: int
    path: str


class DiskMounted(Message):
    """`quota`: bytes that the tier may use, 0 if that is its own affair; `evict`: whether old values make room."""

    resumed: bool
    quota: int
    evict: bool


class DiskRecord(Message):
    """One value on disk; `body` has no extents."""

    seq: int
    body: Body


class DiskAnnounce(Message):
    segment: int
    records: list[DiskRecord]
    last: bool


class Promotion(Message):
    """Bring the value `disk_seq` into memory, as the record `seq` in `part`."""

    disk_seq: int
    seq: int
    part: Part


class Piece(Message):
    """One part of a value in memory, and the tcp address of the server that has it."""

    segment: int
    tcp: str
    slot: int
    extents: list[int]  # offset, length, ...


class Gather(Message):
    """Write the value whose parts are the records `seq` of these pieces, in their order; one of them is the owner's."""

    seq: int
    pieces: list[Piece]


class DiskOrders(Message):
    """Master → owner, one way.  Write records `seqs` (head slots `slots`) to disk; forget the values `drop` on disk;
    promote; write values that lie in parts.  An order may come twice; what came of each is in a DiskReport."""

    segment: int
    slots: list[int]
    seqs: list[int]
    drop: list[int]
    promote: list[Promotion]
    gather: list[Gather] = []


class DiskReport(Message):
    """Owner → master, sent again until it was answered with Codes.  `written` (with their `keys`) are on disk; `failed`
    could not be written; `evicted` (with `evicted_keys`) have left the disk by themselves, `dropped` by order.
    `promoted` and `unpromoted` are numbers of promotions' records.  `counts` are totals by name."""

    segment: int
    written: list[int] = []
    keys: list[str] = []
    failed: list[int] = []
    evicted: list[int] = []
    evicted_keys: list[str] = []
    dropped: list[int] = []
    promoted: list[int] = []
    unpromoted: list[int] = []
    used: int = 0
    quota: int = 0
    queue: int = 0
    counts: dict[str, int] = {}


class Stage(Message):
    """Read these values from disk to where they can be copied from.  Reply Staged, OBJECT_REPLICA_BUSY for all if there
    is no room for them within 2 s; whoever asks shall not be waiting with another ticket unreturned."""

    segment: int
    seqs: list[int]


class Staged(Message):
    """`offsets`: where in the segment's memory each value lies, or a code < 0.  They stay there until Unstage of
    `ticket`, or for `ttl_ms` counted from when Stage was sent."""

    ticket: int
    ttl_ms: int
    offsets: list[int]


class Unstage(Message):
    """One way: what these tickets hold is copied."""

    tickets: list[int]
