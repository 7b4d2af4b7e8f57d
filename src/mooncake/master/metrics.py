"""The master's metrics: values read at the moment of the question, and their Prometheus text.

The registry is private to its Metrics object and holds the process's own metrics too.  The text is written here and
not by prometheus-client's writer: that one appends _total to every counter, and the drop-in names include counters
without it; whole numbers stay whole numbers.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CollectorRegistry, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from mooncake.master.metric_table import (
    COUNTERS,
    GAUGES,
    OWN_GAUGES,
    SEGMENT_GAUGES,
    TENANT_GAUGES,
    VALUE_SIZE_BOUNDS,
    VALUE_SIZES,
)
from mooncake.master.service import MasterService

CONTENT_TYPE = "text/plain; version=0.0.4"


class Metrics:
    """What the master is worth at this moment; a collector of prometheus-client."""

    def __init__(self, service: MasterService) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def values(self) -> dict[str, float]:
        """Every metric without labels, by name."""
        totals = self._service.directory.totals()
        values: dict[str, float] = dict.fromkeys([*COUNTERS, *GAUGES, *OWN_GAUGES], 0)
        values.update(self._service.counters)
        values.update(self._service.counters.snapshots)
        values.update(
            master_allocated_bytes=totals.allocated_bytes,
            master_total_capacity_bytes=totals.capacity_bytes,
            master_key_count=totals.key_count,
            master_soft_pin_key_count=totals.soft_pinned,
            master_active_clients=totals.clients,
            master_put_start_discarded_staging_size=totals.discarded_bytes,
            mem_cache_nums_=totals.in_memory,
            **totals.disks,
            mooncake_quarantined_bytes=totals.quarantined_bytes,
            mooncake_read_leases=totals.read_leases,
            mooncake_open_puts=totals.open_puts,
            mooncake_waiting_puts=totals.waiting_puts,
            mooncake_drain_jobs=totals.drain_jobs,
        )
        return values

    def collect(self) -> Iterator[Metric]:
        """All metric families."""
        values = self.values()
        for name, text in COUNTERS.items():
            family = Metric(name, text, "counter")
            family.add_sample(name, {}, values[name])
            yield family
        for name, text in (GAUGES | OWN_GAUGES).items():
            yield GaugeMetricFamily(name, text, values[name])
        yield from self._segments()
        yield from self._tenants()
        yield self._value_sizes()

    def text(self) -> str:
        """All metrics as Prometheus text."""
        return "".join(_lines(self._registry.collect()))

    def _segments(self) -> Iterator[Metric]:
        used_name, size_name = SEGMENT_GAUGES
        used = GaugeMetricFamily(used_name, SEGMENT_GAUGES[used_name], labels=["segment"])
        size = GaugeMetricFamily(size_name, SEGMENT_GAUGES[size_name], labels=["segment"])
        by_name: dict[str, tuple[int, int]] = {}
        for segment in self._service.directory.segments():  # several may have one name
            used_before, size_before = by_name.get(segment.name, (0, 0))
            by_name[segment.name] = used_before + segment.used, size_before + segment.size
        for name, (used_bytes, size_bytes) in by_name.items():
            used.add_metric([name], used_bytes)
            size.add_metric([name], size_bytes)
        yield from (used, size)

    def _tenants(self) -> Iterator[Metric]:
        tenants = self._service.directory.tenants
        if tenants is None:
            return
        for name, text in TENANT_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=["tenant"])
            for tenant in tenants:
                figures = {
                    "mooncake_tenant_used_bytes": tenant.taken,
                    "mooncake_tenant_quota_bytes": tenant.quota or 0,
                    "mooncake_tenant_limit_bytes": tenants.limit(tenant),
                    "mooncake_tenant_keys": tenant.objects,
                    "mooncake_tenant_evicted_keys": tenant.evicted,
                    "mooncake_tenant_refused_keys": tenant.refused,
                }
                family.add_metric([tenant.name], figures[name])
            yield family

    def _value_sizes(self) -> Metric:
        """The histogram; class n of the counters holds values of at most 2**n bytes."""
        counters = self._service.counters
        up_to = list(accumulate(counters.value_sizes))
        buckets = [(f"{bound:.6f}", float(up_to[(bound - 1).bit_length()])) for bound in VALUE_SIZE_BOUNDS]
        buckets.append(("+Inf", float(up_to[-1])))
        return HistogramMetricFamily(VALUE_SIZES, "Sizes of values", buckets, counters.value_bytes)


def _lines(families: Iterable[Metric]) -> Iterator[str]:
    for family in families:
        is_counter = family.type == "counter" and family.samples
        name = family.samples[0].name if is_counter else family.name
        yield f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n"
        for sample in family.samples:
            labels = ",".join(f"{label}={_quoted(value)}" for label, value in sample.labels.items())
            yield f"{sample.name}{{{labels}}} " if labels else f"{sample.name} "
            yield f"{_number(sample.value)}\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n").replace('"', '\\"')
    return f'"{escaped}"'


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
