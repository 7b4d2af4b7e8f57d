"""A sample of times in the few numbers that a report shows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Of `count` values, in their unit.  All are NaN when there are none."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        if not values:
            nan = math.nan
            return cls(0, nan, nan, nan, nan, nan, nan)
        ordered = sorted(values)
        p50, p90, p95, p99 = (quantile(ordered, share) for share in (0.50, 0.90, 0.95, 0.99))
        return cls(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])

    def scaled(self, factor: float) -> "Summary":
        """The same in another unit."""
        return Summary(
            self.count,
            self.mean * factor,
            self.p50 * factor,
            self.p90 * factor,
            self.p95 * factor,
            self.p99 * factor,
            self.largest * factor,
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted sample lies, interpolated between neighbours."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
