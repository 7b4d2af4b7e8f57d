"""What the two halves of the connector tell each other with every engine step.

scheduler → workers   PushPlan     what to ask prefill for, what to hand over, which requests are over
workers → scheduler   PushReport   prompts that did not come whole
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from mooncake.vllm.push.items import Handed, Pull, Share


@dataclass
class PushPlan(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Keys are request ids.

    pulls      decode: begin these                  begun      prefill: will be asked for
    cancels    decode: what comes is not wanted     shares     prefill: computed in this step
                                                    preempted  prefill: its blocks may be overwritten in this step
                                                    finished   prefill: computed, its blocks are kept for us
                                                    dropped    prefill: transfer → why it does not come
    """

    pulls: dict[str, Pull] = field(default_factory=dict)
    cancels: list[str] = field(default_factory=list)
    begun: dict[str, Handed] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass
class PushReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """`failed`: requests of decode whose prompt did not come whole → how many of the blocks that were asked for did."""

    failed: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "PushReport":
        assert isinstance(other, PushReport)
        for request, whole in other.failed.items():
            self.failed[request] = min(whole, self.failed.get(request, whole))
        return self
