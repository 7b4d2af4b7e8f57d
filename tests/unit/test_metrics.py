"""Every name of the drop-in's metrics, with its type, in text that Prometheus' own parser reads."""

import re
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mooncake.master.counters import Counters
from mooncake.master.metric_table import COUNTERS, GAUGES, OWN_GAUGES, SEGMENT_GAUGES, VALUE_SIZES
from mooncake.master.metrics import Metrics
from mooncake.master.summary import Summary, size_text
from mooncake.master.views import SegmentView, Totals

# Of the drop-in's 138 names, those whose form is easily lost.
ODD_COUNTERS = ("mem_cache_hit_nums_", "file_cache_hit_nums_", "valid_get_nums_", "total_get_nums_")
ODD_COUNTERS += ("master_evicted_key_count", "master_attempted_evictions_mem", "master_put_start_discard_cnt")


def segment(name: str, size: int, used: int) -> SegmentView:
    return SegmentView(name, 1, "1-2", "host", "h:1", "tcp", size, used, "OK")


@pytest.fixture
def service() -> SimpleNamespace:
    """A master in which everything counted is 1, 2, 3, ..."""
    counters = Counters()
    for number, name in enumerate(counters, 1):
        counters[name] = number
    counters.value_sizes[12] = 5  # at most 4096 bytes
    counters.value_sizes[13] = 1
    counters.value_sizes[40] = 2
    counters.value_bytes = 1 << 41
    totals = Totals(
        key_count=7,
        in_memory=6,
        soft_pinned=1,
        allocated_bytes=3 << 30,
        capacity_bytes=4 << 30,
        quarantined_bytes=256,
        read_leases=2,
        waiting_puts=3,
        open_puts=4,
        discarded_bytes=512,
        clients=5,
        drain_jobs=6,
        disks={"file_cache_nums_": 3},
    )
    segments = [segment("a", 100, 10), segment('odd"name\\', 5, 0), segment("a", 200, 20)]
    directory = SimpleNamespace(totals=lambda: totals, segments=lambda: segments, tenants=None)
    return SimpleNamespace(counters=counters, directory=directory)


def test_names_and_types(service: SimpleNamespace) -> None:
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", Metrics(service).text(), re.MULTILINE))
    expected = dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES | OWN_GAUGES | SEGMENT_GAUGES, "gauge")
    expected[VALUE_SIZES] = "histogram"
    assert {name: kind for name, kind in types.items() if not name.startswith("process_")} == expected
    assert types["process_resident_memory_bytes"] == "gauge"
    assert types["process_cpu_seconds_total"] == "counter"
    assert all(types[name] == "counter" for name in ODD_COUNTERS)


def test_every_counter_has_a_metric() -> None:
    assert set(Counters()) <= set(COUNTERS)


def test_values(service: SimpleNamespace) -> None:
    text = Metrics(service).text()
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name, value in service.counters.items():
        parsed = name if name.endswith("_total") else f"{name}_total"  # the parser's own doing
        assert samples[parsed,] == value
    assert samples["master_allocated_bytes",] == 3 << 30
    assert samples["master_active_clients",] == 5
    assert samples["mooncake_quarantined_bytes",] == 256
    assert samples["master_copy_start_requests_total",] == 0
    assert samples["segment_allocated_bytes", "a"] == 30
    assert samples["segment_total_capacity_bytes", "a"] == 300
    assert samples["segment_total_capacity_bytes", 'odd"name\\'] == 5
    assert samples["master_value_size_bytes_bucket", "4096.000000"] == 5
    assert samples["master_value_size_bytes_bucket", "65536.000000"] == 6
    assert samples["master_value_size_bytes_bucket", "+Inf"] == 8
    assert samples["master_value_size_bytes_count",] == 8
    assert samples["master_value_size_bytes_sum",] == 1 << 41


def test_whole_numbers_stay_whole(service: SimpleNamespace) -> None:
    assert f"\nmaster_total_capacity_bytes {4 << 30}\n" in Metrics(service).text()


def test_nothing_is_registered_for_the_whole_process(service: SimpleNamespace) -> None:
    assert Metrics(service).text()
    assert Metrics(service).text()  # a second one in the same process


def test_summary(service: SimpleNamespace) -> None:
    metrics = Metrics(service)
    summary = Summary(metrics.values)
    first = summary.line()
    assert "master={Mem Storage: 3.00 GB / 4.00 GB (75.0%) | NVMe-oF SSD: 0 B / 0 B" in first
    assert "Keys: 7 (soft-pinned: 1) | Clients: 5 |" in first
    assert first.endswith("state=0}")
    second = summary.line()
    assert "Exist=0.00/0.00" in second  # nothing since the first
    assert "\n" not in second


def test_size_text() -> None:
    assert [size_text(size) for size in (0, 1023, 1 << 20, 3 << 29, 1 << 60)] == [
        "0 B",
        "1023 B",
        "1.00 MB",
        "1.50 GB",
        "1024.00 PB",
    ]
