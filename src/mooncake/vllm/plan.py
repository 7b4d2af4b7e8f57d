"""What the two halves of the connector tell each other with every engine step.

scheduler → workers   StepPlan   what to load, what to save once this step's forward pass is over
workers → scheduler   Report     under which keys each worker stores, what has been saved, what could not be loaded
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from mooncake.vllm.blocks import Blocks


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """`loads`: by request, of each group what it loads.  `job` numbers this step's saves.  `idle`: nothing is computed
    in this step."""

    loads: dict[str, list[Blocks]] = field(default_factory=dict)
    saves: list[Blocks] = field(default_factory=list)
    job: int = 0
    idle: bool = False


@dataclass
class Saved:
    """A job is over on `ranks` workers; `failed`: which of its blocks, counted through, are not in the pool."""

    ranks: int = 1
    failed: set[int] = field(default_factory=set)


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """`heads`: by rank, for each group how its keys begin.  `failed`: by request, which of the blocks it loads, counted
    through, are missing."""

    heads: dict[int, list[list[str]]] = field(default_factory=dict)
    saved: dict[int, Saved] = field(default_factory=dict)
    failed: dict[str, set[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.heads or self.saved or self.failed)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Report":
        assert isinstance(other, Report)
        self.heads |= other.heads
        for job, saved in other.saved.items():
            mine = self.saved.setdefault(job, Saved(ranks=0))
            mine.ranks += saved.ranks
            mine.failed |= saved.failed
        for request, missing in other.failed.items():
            self.failed.setdefault(request, set()).update(missing)
        return self
