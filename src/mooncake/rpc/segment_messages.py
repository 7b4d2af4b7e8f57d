"""The part of the protocol that is about a segment's server coming to its end, and about its figures (see
`rpc.messages`)."""

from mooncake.rpc.message import Message


class Retire(Message):
    """Segment → master: nothing new shall be placed here, an Unmount will follow; what is here stays readable until
    then.  Said again to every master.  Reply Codes."""

    segment: int


class Draining(Message):
    """Master → segment, one way: this segment is being emptied by a drain job; remember it.  Segment → every later
    master, one way, once all it holds has been announced: so the job goes on there.  `job` (0, 0): no more.  The rest
    is what the job was asked for; `created` in seconds since the epoch."""

    segment: int
    job: tuple[int, int]
    names: list[str]
    targets: list[str]
    most: int
    created: float


class DiskUnmount(Message):
    """Segment → master: what is on this server's disk is not to be read any more.  Reply Codes."""

    segment: int


class LeaveDisk(Message):
    """Engine → its own segment server: send DiskUnmount, and write nothing to disk any more.  What readers were told of
    before is still read for them.  Reply Codes([0]) once the master knows."""


class TakeOver(Message):
    """Engine → a segment server of its host that has lost its own; the engine's pidfd and standard error come with it.
    `identity`: all settings that must be the same; `linger_ms`: how long to stay when this engine has gone too.  Reply
    Serving, with the descriptors of memory and table; from then on the connection is as a child's."""

    identity: str
    linger_ms: int


class LingerQuery(Message):
    """Whose were you, and how long will you stay?"""


class Lingers(Message):
    """`size` in bytes."""

    name: str
    size: int
    left_ms: int
    pid: int


class Family(Message):
    """A metric of the Prometheus text format: `kind` counter, gauge or histogram; `samples`: (suffix of the name,
    labels as text, value)."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, str, float]]


class FiguresQuery(Message):
    """Engine → its own segment server: how is it?"""


class Figures(Message):
    families: list[Family]
