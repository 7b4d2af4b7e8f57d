"""The proxy's figures, in a registry of their own."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from mooncake.proxy.instances import Instance

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ADDED_BUCKETS = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.25, 1.0)
_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)


class Metrics:
    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        name = "mooncake_proxy_"
        self.requests = Counter(f"{name}requests", "Requests answered", ["route", "status"], registry=registry)
        self.retries = Counter(f"{name}retries", "Tries after a failed one", ["role", "why"], registry=registry)
        self.resumptions = Counter(
            f"{name}resumptions", "Streams lost after their first event", ["result"], registry=registry
        )
        self.ejections = Counter(f"{name}ejections", "Instances taken out", ["role", "instance"], registry=registry)
        self.prefills = Counter(
            f"{name}prefills",
            "Prefill halves by result: with_params, without_params (no kv_transfer_params came back), failed, skipped",
            ["result"],
            registry=registry,
        )
        self.matches = Counter(
            f"{name}indexer_queries",
            "Questions to the indexer by result: matched, unmatched, late, failed, skipped",
            ["result"],
            registry=registry,
        )
        self.disconnects = Counter(f"{name}client_disconnects", "Clients gone before the end", registry=registry)
        self.ttft = Histogram(
            f"{name}time_to_first_token_seconds",
            "From a request's arrival to the first event passed on",
            ["route"],
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.added = Histogram(
            f"{name}added_latency_seconds",
            "The part of the time to the first event in which no instance was waited for",
            buckets=_ADDED_BUCKETS,
            registry=registry,
        )

        self._children: dict[tuple[str, ...], Counter | Histogram] = {}

    def count_request(self, route: str, status: int) -> None:
        key = (route, str(status))
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self.requests.labels(*key)
        child.inc()  # type: ignore[union-attr]

    def observe_first(self, route: str, total_s: float, added_s: float) -> None:
        self.ttft.labels(route).observe(total_s)
        self.added.observe(added_s)

    def watch(self, instances: "Iterable[Instance]") -> None:
        """Show what is in flight on each of them (read anew at each scrape)."""
        self._registry.register(_InFlight(instances))

    def forget(self, role: str, url: str) -> None:
        """An instance that was removed leaves no series behind."""
        try:
            self.ejections.remove(role, url)
        except KeyError:
            pass

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _InFlight(Collector):
    def __init__(self, instances: "Iterable[Instance]") -> None:
        self._instances = instances

    def collect(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            "mooncake_proxy_in_flight", "Requests in flight by instance", labels=["role", "instance"]
        )
        ready = GaugeMetricFamily(
            "mooncake_proxy_instance_ready", "1 if the instance gets requests", labels=["role", "instance"]
        )
        for instance in self._instances:
            in_flight.add_metric([instance.role, instance.url], instance.in_flight)
            ready.add_metric([instance.role, instance.url], float(instance.state == "ready"))
        yield in_flight
        yield ready
