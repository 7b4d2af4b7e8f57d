"""The indexer's figures, in a registry of their own."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mooncake.indexer.index import Index
from mooncake.indexer.subscription import Subscription

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NAME = "mooncake_indexer_"
_LABELS = ("instance", "tenant", "rank")
_COUNTS = {
    "messages": "Messages of KV events applied",
    "events": "KV events applied",
    "gaps": "Gaps in a publisher's numbers",
    "replayed": "Messages that came by replay",
    "emptied": "Times that what an instance holds had become unsure, and was forgotten",
    "misread": "Messages that could not be understood",
}


class Metrics(Collector):
    def __init__(self, index: Index, subscriptions: Mapping[Any, Subscription]) -> None:
        self._index, self._subscriptions = index, subscriptions
        self._registry = CollectorRegistry()
        self.queries = Counter(f"{_NAME}queries", "Queries answered", ["route"], registry=self._registry)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(f"{_NAME}forgotten", "Blocks forgotten for want of room", value=self._index.forgotten)
        blocks = GaugeMetricFamily(f"{_NAME}blocks", "Blocks held", labels=_LABELS)
        up = GaugeMetricFamily(f"{_NAME}connected", "1 if the publisher is there", labels=_LABELS)
        counters = {name: CounterMetricFamily(_NAME + name, text, labels=_LABELS) for name, text in _COUNTS.items()}
        for name, subscription in self._subscriptions.items():
            labels = [str(part) for part in name]
            blocks.add_metric(labels, len(subscription.holding))
            up.add_metric(labels, float(subscription.connected))
            for count, family in counters.items():
                family.add_metric(labels, getattr(subscription.counts, count))
        yield from (blocks, up, *counters.values())
