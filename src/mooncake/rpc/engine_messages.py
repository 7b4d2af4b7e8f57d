"""The part of the protocol that transfer engines speak with one another (see `rpc.messages`)."""

from mooncake.rpc.message import Message


class EngineOpen(Message):
    """Who asks, for copies that bypass the asked process: `namespace` says of which host and pid namespace `pid` is,
    `start` tells it from an earlier process of that number.  pid 0: only asks."""

    pid: int
    start: int
    namespace: str


class EngineOpened(Message):
    """`first_buffer`: address of the first registered region, 0 none.  The rest is about the region table (see
    transfer.region_table): its descriptor and address in process `pid`, and the asker's slot in it (-1: none)."""

    first_buffer: int
    pid: int
    start: int
    namespace: str
    table_fd: int = -1
    table_address: int = 0
    slot: int = -1
    token: int = 0


class EngineExports(Message):
    """What is behind these numbers of exported device memory (see transfer.cuda.peers)?"""

    numbers: list[int]


class Exported(Message):
    """An allocation of device memory: where it lies in its process, bytes, UUID of its GPU, its IPC handle."""

    number: int
    base: int
    size: int
    device: bytes
    handle: bytes


class EngineExported(Message):
    """Those that there are."""

    exported: list[Exported]


class EngineRead(Message):
    """Addresses and lengths (arrays of i64) of the peer's registered memory.  The reply, Codes, is followed by their
    bytes if it is [0]."""

    addresses: bytes
    lengths: bytes


class EngineWrite(Message):
    """As EngineRead; the bytes follow, and are answered with Codes.  More than EAGER_SIZE bytes only follow once a
    first Codes([0]) has come."""

    addresses: bytes
    lengths: bytes


EAGER_SIZE = 256 << 10


class EngineNotify(Message):
    """A notification; `number` is random, so that one sent twice is told apart from two."""

    number: int
    name: str
    text: str
