"""Messages about tasks, about single replicas, and to a `mooncake_client`; numbered in `messages`."""

from __future__ import annotations

from mooncake.rpc.message import Message


class CopyTask(Message):
    """Reply TaskCreated."""

    key: str
    targets: list[str]  # names of segments


class MoveTask(Message):
    key: str
    source: str
    target: str


class TaskCreated(Message):
    task: tuple[int, int]


class QueryTask(Message):
    task: tuple[int, int]


class TaskState(Message):
    """`type` and `status` as TaskType and TaskStatus; `client`: the owner of the source."""

    type: int
    status: int
    created_ms: int
    updated_ms: int
    client: tuple[int, int]
    message: str


class ReplicaClear(Message):
    """Remove what this client wrote and nobody has leased; `segment` not "": only the replicas there."""

    keys: list[str]
    segment: str


class Cleared(Message):
    keys: list[str]


class CopyPart(Message):
    """Master → owner of a replica's part, one way: write its record in `slot` and its bytes into the target as well.
    Answered with CopyEnded."""

    copy_id: int
    segment: int
    slot: int
    seq: int  # of the record to copy
    target: int
    target_name: str
    tcp: str  # where the target's server listens
    term: int
    slots: list[int]
    to_seq: int  # of the copy
    extents: list[int]
    version: int
    replica: int
    part: int
    parts: int


class CopyEnded(Message):
    """Owner → master, one way: `code` 0 if the copy is whole."""

    copy_id: int
    code: int


class Introduce(Message):
    """Which pool do you belong to?"""


class Introduction(Message):
    """What a store needs to join it; `host`: the name that the answering process is reached by."""

    master: str
    metadata: str
    protocol: str
    host: str
    tenant: str = "default"
