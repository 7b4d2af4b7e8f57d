"""What plans are made of."""

from typing import NamedTuple


class Pull(NamedTuple):
    """Decode: a prompt to be had from prefill.  `blocks`: of ours, for the prompt's block `first` and those after it;
    none: nothing of it is wanted.  `tokens`, `digest`: the prompt's length and a sum of it."""

    transfer: str
    registry: str
    engine: str
    first: int
    blocks: list[int]
    tokens: int
    digest: int


class Share(NamedTuple):
    """Prefill: a request of which this step computes a part.  `new`: blocks that its table has got since the last time,
    or since it was preempted.  `full`: how many of its blocks are whole after this step."""

    request: str
    new: list[int]
    full: int


class Handed(NamedTuple):
    """Prefill: a prompt that decode will ask for."""

    transfer: str
    tokens: int
    digest: int
