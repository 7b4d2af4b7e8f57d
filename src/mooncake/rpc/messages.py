"""The protocol: every message between client, master and segment server.

Each struct is one message body (msgpack arrays, see `rpc.frame`); `KINDS` gives it its number.
Sizes and offsets are bytes; times are milliseconds unless a name says otherwise.  A *segment* is named
by a random 63-bit integer that its server chose, valid under every master.  A *place* is a flat list
[segment, offset, length, segment, offset, length, ...] that says where the bytes of one replica lie, in order; the
place of a replica on disk is [-segment, number, length]: the server of that segment has it, by that sequence number.

    client → master      Hello, Exist, Prefix, GetStart, LeaseReturn, Damaged, Query, PutStart, PutEnd, Remove,
                         RemoveRegex, RemoveAll, SegmentQuery, Ping, CopyTask, MoveTask, QueryTask, ReplicaClear
    segment → master     Hello, Mount, Announce, AnnouncePlain, Heartbeat, Retire, Unmount, Killed, CopyEnded,
                         Draining, DiskMount, DiskAnnounce, DiskReport, DiskUnmount
    master → segment     Kill, CopyPart, DiskOrders, Draining
    anybody → anybody    Hello, Prove
    client → segment     Attach (unix socket, answered with descriptors), Read, Write, Stage, Unstage (tcp)
    segment → segment    Read, Standing, Write (tcp)
    store → mooncake_client  Introduce
    engine → its own segment server  Serve, TakeOver, Stop, LeaveDisk, FiguresQuery
    engine → engine      Hello, Ping, EngineOpen, EngineRead, EngineWrite, EngineNotify, EngineExports

Life of a put: PutStart → the writer writes each part's table record as WRITING, checks that the segment's term is
still the grant's, copies, marks the records COMPLETE → PutEnd.  Life of a freed extent: the master drops the
object, waits until no read lease is on it, sends Kill(DEAD); only when the owner's Killed has come may the
extent be given out again.  An owner answers Kill for a WRITING record only when that record's writer can write no more.
"""

from __future__ import annotations

import msgspec

from mooncake.rpc.data_messages import Attach, Attached, Read, Standing, Write
from mooncake.rpc.disk_messages import (
    DiskAnnounce,
    DiskMount,
    DiskMounted,
    DiskOrders,
    DiskReport,
    Stage,
    Staged,
    Unstage,
)
from mooncake.rpc.engine_messages import (
    EngineExported,
    EngineExports,
    EngineNotify,
    EngineOpen,
    EngineOpened,
    EngineRead,
    EngineWrite,
)
from mooncake.rpc.message import Message
from mooncake.rpc.record_messages import Body, Damaged, Part
from mooncake.rpc.segment_messages import (
    DiskUnmount,
    Draining,
    Figures,
    FiguresQuery,
    LeaveDisk,
    LingerQuery,
    Lingers,
    Retire,
    TakeOver,
)
from mooncake.rpc.serving_messages import Serve, Stop
from mooncake.rpc.task_messages import (
    Cleared,
    CopyEnded,
    CopyPart,
    CopyTask,
    Introduce,
    Introduction,
    MoveTask,
    QueryTask,
    ReplicaClear,
    TaskCreated,
    TaskState,
)

PROTOCOL = 3
SEGMENT = "segment"  # the role of a segment server


# ---------------------------------------------------------------- session


class Hello(Message):
    """First message of every connection.  `client` is "u64-u64" in text; role "client" or SEGMENT."""

    protocol: int
    version: str
    role: str
    client: str
    host: str  # same host ⇔ same text (boot id and network namespace)
    nonce: bytes = b""  # of a side that has the cluster's secret
    tenant: str = "default"  # whose keys a client names; without effect unless the master has tenants


class Welcome(Message):
    """Reply to Hello.  `term` grows with every master; `lease_ms` is the read lease; `instance` is a number of the
    answering engine's or segment server's life.  With a `challenge` (and the `proof` of who made it) it is none yet:
    Prove must come first."""

    protocol: int
    version: str
    term: int
    lease_ms: int
    instance: int = 0
    challenge: bytes = b""
    proof: bytes = b""


class Prove(Message):
    """The answer to a challenge (see `security.secret`).  Reply Welcome."""

    proof: bytes
    tenant_proof: bytes = b""  # to a master: that the client is of the tenant that it said (see `security.credential`)


class Failure(Message):
    """Body of a FAILED reply."""

    code: int
    text: str


class Ping(Message):
    """Is the master there?  Answered with Codes([0])."""


class Codes(Message):
    """One result code an item asked for."""

    codes: list[int]


class Count(Message):
    count: int


# ---------------------------------------------------------------- reading


class Exist(Message):
    keys: list[str]


class ExistReply(Message):
    """One byte a key: 1 there (and now under a probe lease), 0 not."""

    found: bytes


class Need(Message):
    """What must be there for a list of keys to be of use up to a place in it: blocks of `every` tails each, named by
    the last of them, under all of `heads` (an engine's ranks, which hold a part of each block).

    All blocks before the place if `last` is 0; else only `last` of them, those that end `skip` blocks before it (what a
    sliding window of attention still sees, or the one newest state).
    """

    heads: list[str]
    every: int = 1
    last: int = 0
    skip: int = 0


class Prefix(Message):
    """How far is each of several lists of keys there?  Every key is a head and a tail; a place is a number of a list's
    first tails, a multiple of `step`, and counts if what all `needs` say is there."""

    needs: list[Need]
    tails: list[list[str]]
    step: int = 1


class PrefixReply(Message):
    """For each list the farthest place that counts; what it needs is now under a probe lease."""

    lengths: list[int]


class GetStart(Message):
    """Where are these keys?  Found ones get a read lease, counted from when the client sent this."""

    keys: list[str]


class Found(Message):
    """One key's whole replicas.  `states` is only filled by Query: a ReplicaStatus for each place.  `checksum`: of the
    value, 0 if its writer gave none."""

    size: int
    places: list[list[int]]
    states: list[int] = []
    checksum: int = 0


class GetReply(Message):
    """`found`: for each key a code < 0 or its Found.  `lease` 0: nothing was leased.  `term` of the master."""

    lease: int
    lease_ms: int
    found: list[int | Found]
    term: int


class LeaseReturn(Message):
    """One way: these leases' copies are finished."""

    leases: list[int]


class Query(Message):
    """As GetStart for get_size and get_replica_desc: grants a probe lease, not a read lease (lease is 0)."""

    keys: list[str]


# ---------------------------------------------------------------- writing


class PutOptions(Message):
    """What ReplicateConfig asks for, already checked by the client.  `groups`: one a key, or empty."""

    replica_num: int = 1
    preferred: list[str] = []
    same_node: bool = False
    hard_pin: bool = False
    soft_pin_action: int = 0
    soft_pin_ttl_ms: int | None = None
    groups: list[str] = []
    data_type: int = 0
    upsert: bool = False  # replace the value that is there

    def of(self, part: slice) -> PutOptions:
        """Those of some of the keys."""
        return msgspec.structs.replace(self, groups=self.groups[part])


class PutStart(Message):
    """`eager`: this put's PutEnd will follow within milliseconds, and its caller may go on before the reply to
    it.  So that nobody can see the difference, a request that meets such an open put waits for it."""

    keys: list[str]
    sizes: list[int]
    options: PutOptions | None = None
    eager: bool = False


class Kept(Message):
    """What a value takes over from the one that it replaces; `soft_pin_ms` 0: no soft pin."""

    group: str
    hard_pin: bool
    soft_pin_ms: int


class Grant(Message):
    """Room for one key: `replicas` is a list of replicas, each a list of parts in order.  `kept`: of an upsert."""

    seq: int
    replicas: list[list[Part]]
    kept: Kept | None = None


class PutStarted(Message):
    """`scope`: what the keys and groups of these puts' records shall start with, if the master has tenants."""

    term: int
    grants: list[int | Grant]
    scope: str = ""


class PutEnd(Message):
    """`done`: whole with all replicas; `failed`: forget them; `lost`: [seq, replica, ...] that did not
    become whole though another replica of that put did (its seq is in `done`).  `checksums`: of each of `done`, 0 if it
    has none; or empty.  Reply Codes: done, then failed."""

    done: list[int]
    failed: list[int] = []
    lost: list[int] = []
    checksums: list[int] = []


# ---------------------------------------------------------------- removing


class Remove(Message):
    keys: list[str]
    force: bool


class RemoveRegex(Message):
    pattern: str
    force: bool


class RemoveAll(Message):
    force: bool


# ---------------------------------------------------------------- segments


class SegmentInfo(Message):
    """A mounted segment and how to reach it.  `tcp` is "host:port"; `unix` a socket path, or "@name"
    for an abstract one, that gives same-host processes the memory's descriptors.  `endpoint`: what users are shown
    instead of `tcp`, if not ""."""

    segment: int
    name: str
    size: int
    tcp: str
    unix: str
    host: str
    client: str
    protocol: str = "tcp"
    endpoint: str = ""

    @property
    def shown(self) -> str:
        """The transport endpoint, as users know it."""
        return self.endpoint or self.tcp


class SegmentQuery(Message):
    """Reply SegmentList, only of those that are mounted."""

    segments: list[int]


class SegmentList(Message):
    segments: list[SegmentInfo]


class Mount(Message):
    """`term` of the master that this segment last served (0: new, nothing to announce), and the longest read
    lease that a master ever gave on it.  The reply is Mounted; without `resumed` every record follows in
    Announce messages, the last one marked (a new segment has none to send)."""

    info: SegmentInfo
    term: int
    lease_ms: int = 0


class Mounted(Message):
    """`resumed`: the master still knows what this segment holds."""

    resumed: bool


class Record(Message):
    """One live table record: `state` is a transfer.table state (WRITING, COMPLETE or REMOVED)."""

    slots: list[int]
    state: int
    term: int
    seq: int
    body: Body


class Announce(Message):
    """Records of a segment that is mounted; a server may send several before it has the first reply."""

    segment: int
    records: list[Record]
    last: bool


class AnnouncePlain(Message):
    """Further records, before the last Announce, in columns, since there may be millions: COMPLETE, of whole values in
    one extent each and slots in a row, written by `client`, and for the rest as the defaults of Body are.  A column has
    a u64 a record, little endian; `slots` is the first slot << 8 | their number; `checksums` is empty if none has one.
    Reply Codes."""

    segment: int
    client: str
    keys: list[str]
    seqs: bytes
    sizes: bytes
    offsets: bytes
    slots: bytes
    checksums: bytes = b""


class Heartbeat(Message):
    """Each second on the segment's connection.  Reply Codes: per segment 0, or SEGMENT_NOT_FOUND: mount it again."""

    segments: list[int]


class Unmount(Message):
    segments: list[int]


class Kill(Message):
    """Master → owner, one way.  hide[i] 1: mark REMOVED and keep the bytes as they are; 0: make it dead,
    and answer with Killed once its writer can write no more."""

    segment: int
    slots: list[int]
    seqs: list[int]
    hide: bytes


class Killed(Message):
    """Owner → master, one way: these records are dead; their extents may be given out again."""

    segment: int
    slots: list[int]
    seqs: list[int]


# ---------------------------------------------------------------- engine process → its private segment server


class Serving(Message):
    """`writer` names the engine's own process in WRITING records."""

    info: SegmentInfo
    writer: int


KINDS: dict[type[Message], int] = {
    message: number  # type: ignore[misc]  # mypy sees only the metaclass of the tuple's items
    for number, message in enumerate(
        (
            Hello, Welcome, Failure, Ping, Codes, Count,
            Exist, ExistReply, GetStart, GetReply, LeaseReturn, Query,
            PutStart, PutStarted, PutEnd,
            Remove, RemoveRegex, RemoveAll,
            SegmentQuery, SegmentList, Mount, Mounted, Announce, Heartbeat, Unmount, Kill, Killed,
            Attach, Attached, Read, Write, Serve, Serving, Stop,
            EngineOpen, EngineOpened, EngineRead, EngineWrite, EngineNotify, EngineExports, EngineExported,
            Prefix, PrefixReply,
            Introduce, Introduction,
            CopyTask, MoveTask, TaskCreated, QueryTask, TaskState, ReplicaClear, Cleared, CopyPart, CopyEnded,
            DiskMount, DiskMounted, DiskAnnounce, DiskOrders, DiskReport, Stage, Staged, Unstage,
            Prove,
            Retire, DiskUnmount, LeaveDisk, FiguresQuery, Figures,
            AnnouncePlain,
            Standing, Draining,
            Damaged, TakeOver, LingerQuery, Lingers,
        ),
        start=1,
    )
}  # fmt: skip
REPLY_OF: dict[type[Message], type[Message]] = {
    Hello: Welcome, Prove: Welcome, Ping: Codes,
    Exist: ExistReply, Prefix: PrefixReply, GetStart: GetReply, Query: GetReply,
    PutStart: PutStarted, PutEnd: Codes, Damaged: Codes, Remove: Codes, RemoveRegex: Count, RemoveAll: Count,
    SegmentQuery: SegmentList, Mount: Mounted, Announce: Codes, Heartbeat: Codes, Unmount: Codes,
    Attach: Attached, Read: Codes, Standing: Codes, Write: Codes, Serve: Serving, Stop: Codes,
    TakeOver: Serving, LingerQuery: Lingers, Retire: Codes, DiskUnmount: Codes, LeaveDisk: Codes, FiguresQuery: Figures,
    AnnouncePlain: Codes, DiskMount: DiskMounted, DiskAnnounce: Codes, DiskReport: Codes, Stage: Staged,
    EngineOpen: EngineOpened, EngineRead: Codes, EngineWrite: Codes, EngineNotify: Codes,
    EngineExports: EngineExported, Introduce: Introduction,
    CopyTask: TaskCreated, MoveTask: TaskCreated, QueryTask: TaskState, ReplicaClear: Cleared,
}  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
DECODERS: dict[int, msgspec.msgpack.Decoder[Message]] = {
    number: msgspec.msgpack.Decoder(message) for message, number in KINDS.items()
}
