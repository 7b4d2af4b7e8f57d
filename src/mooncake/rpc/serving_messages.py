"""The part of the protocol in which an engine tells its private segment server what to be (see `rpc.messages`)."""

from mooncake.rpc.disk_messages import DiskSettings
from mooncake.rpc.message import Message

FILE_MARK = 256  # bytes at the end of a segment in a file that show whether it was cut short


class Serve(Message):
    """First message on the private socket: what to serve.  Ports: where to look for a free one for tcp.
    `metadata`: the metadata service at which the segment is published, "" none; `endpoint` as in SegmentInfo;
    `disk`: its SSD tier, if it has one.
    `path`: the file, from `start` on, that the segment is to lie in, "" for memory.
    `linger_ms`: how long to stay without an engine; for one that sends a TakeOver with this `identity`.
    Answered with Serving and the descriptors of memory and table, or a Failure."""

    segment: int
    name: str
    size: int
    listen: str  # address to listen on
    announce: str  # host that others reach it by
    min_port: int
    max_port: int
    master: str
    client: str
    host: str
    protocol: str
    socket_dir: str  # "" for an abstract unix socket
    metadata: str = ""
    endpoint: str = ""
    disk: DiskSettings | None = None
    path: str = ""
    start: int = 0
    linger_ms: int = 0
    identity: str = ""

    @property
    def capacity(self) -> int:
        """Bytes that take values."""
        return self.size - FILE_MARK if self.path else self.size

    @property
    def memory(self) -> int:
        """Bytes that clients use: the segment, and behind it what values from disk wait in."""
        return self.capacity if self.disk is None else -(-self.size // 4096) * 4096 + self.disk.staging


class Stop(Message):
    """Unmount and end, in `grace_ms`; until then nothing new comes in.  Reply Codes([0]) once the master knows."""

    grace_ms: int = 0
