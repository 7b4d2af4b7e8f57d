"""Counters and histograms of a process, and the Prometheus text of them.

What is counted on the way of values costs a lock and an addition; no library is imported for it.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping

from mooncake.rpc.segment_messages import Family

# fmt: off
BOUNDS_US = (
    10, 25, 50, 75, 100, 125, 150, 200, 250, 300, 400, 500, 750, 1000, 1500, 2000, 3000, 5000, 7000, 15_000, 20_000,
    50_000, 100_000, 200_000, 500_000, 1_000_000,
)  # microseconds
# fmt: on


class Histogram:
    """How long something took.  Thread-safe."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_US) + 1)
        self._total = 0.0
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        us = seconds * 1e6
        at = bisect_left(BOUNDS_US, us)
        with self._lock:
            self._counts[at] += 1
            self._total += us

    @property
    def count(self) -> int:
        with self._lock:
            return sum(self._counts)

    def family(self, name: str, about: str, labels: str = "") -> Family:
        """In microseconds."""
        with self._lock:
            counts, total = list(self._counts), self._total
        samples: list[tuple[str, str, float]] = []
        seen = 0
        for bound, count in zip((*map(str, BOUNDS_US), "+Inf"), counts, strict=True):
            seen += count
            samples.append(("_bucket", ",".join(filter(None, (labels, f'le="{bound}"'))), seen))
        samples += [("_sum", labels, round(total, 1)), ("_count", labels, seen)]
        return Family(name, "histogram", about, samples)


def label(name: str, value: str) -> str:
    """As the text format has it."""
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{name}="{escaped}"'


def counter(name: str, about: str, value: float, labels: str = "") -> Family:
    return Family(name, "counter", about, [("", labels, float(value))])


def gauge(name: str, about: str, value: float, labels: str = "") -> Family:
    return Family(name, "gauge", about, [("", labels, float(value))])


def by_label(name: str, about: str, of: str, values: Mapping[str, float]) -> Family:
    """A counter for each value of the label `of`."""
    return Family(name, "counter", about, [("", label(of, key), value) for key, value in values.items()])


def exposition(families: Iterable[Family]) -> str:
    """The text format.  Families of one name become one."""
    merged: dict[str, Family] = {}
    for family in families:
        known = merged.get(family.name)
        if known is None:
            merged[family.name] = Family(family.name, family.kind, family.help, list(family.samples))
        else:
            known.samples.extend(family.samples)
    lines: list[str] = []
    for family in merged.values():
        lines += (f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}")
        for suffix, labels, value in family.samples:
            braced = f"{{{labels}}}" if labels else ""
            lines.append(f"{family.name}{suffix}{braced} {value:.15g}")
    return "\n".join(lines) + "\n"


def summary(families: Iterable[Family]) -> str:
    """For people: a line a metric that is not zero; of histograms how many there were, and what most took at most."""
    lines = ["=== Metrics Summary ==="]
    for family in families:
        if family.kind == "histogram":
            lines += _quantiles(family)
            continue
        for _, labels, value in family.samples:
            if value:
                lines.append(f"{_titled(family.name, labels)}: {_amount(family.name, value)}")
    return "\n".join(lines) + "\n"


def _quantiles(family: Family) -> list[str]:
    buckets = [(of.rpartition('le="')[2].rstrip('"'), n) for suffix, of, n in family.samples if suffix == "_bucket"]
    count = buckets[-1][1]
    if not count:
        return []
    labels = next(labels for suffix, labels, _ in family.samples if suffix == "_count")
    half, most, all_of_them = (next(bound for bound, n in buckets if n >= count * part) for part in (0.5, 0.95, 1.0))
    times = f"count={count:.0f}, p50<={half}us, p95<={most}us, max<={all_of_them}us"
    return [f"{_titled(family.name, labels)}: {times}"]


def _titled(name: str, labels: str) -> str:
    return f"{name} ({labels})" if labels else name


def _amount(name: str, value: float) -> str:
    if "bytes" not in name:
        return f"{value:.15g}"
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024:
            return f"{value:.2f} {unit}" if unit != "B" else f"{value:.0f} B"
        value /= 1024
    return f"{value:.2f} TB"
