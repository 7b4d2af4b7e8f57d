"""Values brought together from the memory of two servers: exactly theirs, or an error."""

import msgspec
import pytest

from mooncake.errors import TransferError
from mooncake.rpc.disk_messages import Gather, Piece
from mooncake.rpc.messages import PROTOCOL, Hello, Kill
from mooncake.rpc.record_messages import Body
from mooncake.segment.disk import gather
from mooncake.segment.disk.staging import Staging
from mooncake.segment.owner import Owner
from mooncake.segment.streams import Streams
from mooncake.segment.writers import Writers
from mooncake.transfer import table
from mooncake.transfer.listening import listen_tcp
from mooncake.transfer.memory import SegmentMemory
from mooncake.version import __version__

SEQ, TERM, SLOT = 7, 3, 2
SIZE, STAGING = 1 << 20, 1 << 20
FIRST, SECOND = b"first part" * 1000, b"second" * 5000
HELLO = Hello(PROTOCOL, __version__, "segment", "1-1", "host")


class Server:
    """A segment with one part of the value, and its data port."""

    def __init__(self, segment: int, part: int, content: bytes, extents: list[int]) -> None:
        self.owner = Owner(segment, SegmentMemory.create(segment, SIZE + STAGING), Writers())
        self.owner.memory.table.set_term(TERM, 100)
        records = self.owner.memory.table
        whole = len(FIRST) + len(SECOND)
        records.begin([SLOT], SEQ, TERM, 0, Body("k", whole, extents, part=part, parts=2, group="g", client="9-9"))
        records.set_state(SLOT, table.COMPLETE)
        for offset, length in zip(extents[::2], extents[1::2], strict=True):
            self.owner.memory.data[offset : offset + length] = content[:length]
            content = content[length:]
        listener = listen_tcp("127.0.0.1", 20000, 29999)
        self.port = listener.getsockname()[1]
        Streams(listener, self.owner).start()
        self.piece = Piece(segment, f"127.0.0.1:{self.port}", SLOT, extents)

    def kill(self) -> None:
        killed = self.owner.kill(Kill(self.owner.segment, [SLOT], [SEQ], b"\0"))
        assert killed.slots == [SLOT]


@pytest.fixture
def servers():
    first = Server(11, 0, FIRST, [4096, 6000, 100_000, 4000])
    return first, Server(12, 1, SECOND, [256, len(SECOND)])


def gathered(writer: Server, *pieces: Piece, staging: Staging | None = None, term: int = TERM) -> tuple[Body, bytes]:
    staging = staging or Staging(SIZE, STAGING, 1.0)
    with gather.gathered(Gather(SEQ, list(pieces)), writer.owner, staging, HELLO, term) as value:
        offset, length = value.body.extents
        assert (value.slot, value.seq) == (SLOT, SEQ)
        found = value.body, bytes(writer.owner.memory.data[offset : offset + length])
    assert staging.used == 0
    return found


@pytest.mark.parametrize("which", [0, 1])
def test_either_server_gets_the_whole_value(servers, which):
    writer = servers[which]
    body, found = gathered(writer, *(server.piece for server in servers))
    assert found == FIRST + SECOND
    assert msgspec.structs.replace(body, extents=[]) == Body("k", len(found), [], group="g", client="9-9")


@pytest.mark.parametrize("which", [0, 1], ids=["its own part", "the other's"])
def test_a_part_that_went_while_it_was_copied_is_not_believed(servers, which, monkeypatch):
    copies = gather.receive if which else gather.ctypes.memmove

    def copy(*args):
        copies(*args)
        if servers[which].owner.memory.table.state(SLOT)[0] == table.COMPLETE:
            servers[which].kill()

    if which:
        monkeypatch.setattr(gather, "receive", copy)
    else:
        monkeypatch.setattr(gather.ctypes, "memmove", copy)
    staging = Staging(SIZE, STAGING, 1.0)
    with pytest.raises(TransferError):
        gathered(servers[0], *(server.piece for server in servers), staging=staging)
    assert staging.used == 0


def test_what_cannot_be_had(servers):
    first, second = servers
    pieces = [first.piece, second.piece]
    with pytest.raises(TransferError, match="removed meanwhile"):
        gathered(first, *pieces, term=TERM + 1)
    with pytest.raises(TransferError, match="no room in the staging"):
        gathered(first, *pieces, staging=Staging(SIZE, 4096, 1.0))
    with pytest.raises(TransferError, match="not there any more"):
        gathered(first, second.piece)
    with pytest.raises(TransferError, match="SEGMENT_NOT_FOUND"):
        gathered(first, first.piece, msgspec.structs.replace(second.piece, segment=13))
    with pytest.raises(OSError, match="refused"):
        gathered(first, first.piece, msgspec.structs.replace(second.piece, tcp="127.0.0.1:1"))
    second.kill()
    with pytest.raises(TransferError, match="REPLICA_IS_GONE"):
        gathered(first, *pieces)
    first.kill()
    with pytest.raises(TransferError, match="removed meanwhile"):
        gathered(first, *pieces)
