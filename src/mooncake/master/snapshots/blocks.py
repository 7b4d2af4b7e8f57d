"""What a snapshot consists of: one struct a kind of block.

Everything is small beside the pool's values: removed keys, 8 bytes a value for the order of eviction, the tasks.  The
values themselves are in the segments' tables, and are served only as these announce them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from mooncake.master.former import Floor
from mooncake.master.snapshots.file import DamagedError, bodies
from mooncake.master.tasks import Task


class Block(msgspec.Struct, array_like=True, tag_field="block"):
    """One of those below."""


class Head(Block, tag="head"):
    """Always the first.  `taken`: seconds since the epoch; `values`: how many could be read."""

    cluster: str
    version: str
    taken: float
    term: int
    last_seq: int
    values: int


class Mounted(Block, tag="mounted"):
    """The segments that were mounted, number → name."""

    segments: dict[int, str]


class Floors(Block, tag="floors"):
    floors: list[Floor]


class DeadKeys(Block, tag="keys"):
    """Records of each key up to the number are dead."""

    keys: list[str]
    seqs: list[int]


class DeadGroups(Block, tag="groups"):
    groups: list[str]
    seqs: list[int]


class DeadRecords(Block, tag="records"):
    """What the owner (a segment or tier) had not confirmed: records in each slot up to the number are dead."""

    owner: int
    slots: list[int]
    seqs: list[int]


class TaskList(Block, tag="tasks"):
    tasks: list[Task]


class Order(Block, tag="order"):
    """Numbers of values (one of each group), 8 bytes each, in the order in which they were to leave."""

    seqs: bytes


AnyBlock = Head | Mounted | Floors | DeadKeys | DeadGroups | DeadRecords | TaskList | Order
encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyBlock).decode


def blocks(raw: bytes) -> Iterator[AnyBlock]:
    """What `raw` holds, the head first.  Raises DamagedError."""
    for i, body in enumerate(bodies(raw)):
        try:
            block = _decode(body)
        except msgspec.MsgspecError as error:
            raise DamagedError(f"block {i} is of another version ({error})") from None
        if (i == 0) != isinstance(block, Head):
            raise DamagedError("it does not begin with one head")
        yield block
