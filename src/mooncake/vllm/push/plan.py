"""What the two halves of the connector tell each other with every engine step.

scheduler → workers   PushPlan     what to ask prefill for, what to hand over, which requests are over
workers → scheduler   PushReport   prompts that did not come whole
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


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
    all of them if `anew` (it starts, or starts again after a preemption).  `full`: how many of its blocks are whole
    after this step."""

    request: str
    new: list[int]
    anew: bool
    full: int


class Handed(NamedTuple):
    """Prefill: a prompt that decode will ask for."""

    transfer: str
    tokens: int
    digest: int


@dataclass
class PushPlan(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Keys are request ids.

    pulls      decode: begin these                  begun      prefill: will be asked for
    cancels    decode: what comes is not wanted     shares     prefill: computed in this step
                                                    finished   prefill: computed, its blocks are kept for us
                                                    dropped    prefill: transfer → why it does not come
    """

    pulls: dict[str, Pull] = field(default_factory=dict)
    cancels: list[str] = field(default_factory=list)
    begun: dict[str, Handed] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass
class PushReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """`failed`: requests of decode whose prompt did not come."""

    failed: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "PushReport":
        assert isinstance(other, PushReport)
        self.failed |= other.failed
        return self
