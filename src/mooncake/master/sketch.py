"""How often keys were asked for lately, roughly, in bounded memory: a count-min sketch that halves itself."""

from __future__ import annotations

_ROWS = 4
_WIDTH = 1 << 16
_HALVED = bytes(count >> 1 for count in range(256))
_AGE = 8 * _WIDTH  # counts in one row between two halvings


class FrequencySketch:
    """256 KiB.  Never says less than the truth since the last halvings, and seldom more."""

    def __init__(self) -> None:
        self._rows = [bytearray(_WIDTH) for _ in range(_ROWS)]
        self._added = 0

    def add(self, key: str) -> int:
        """Count one more `key`; how many there were, this one included (at most 255)."""
        hashed = hash(key)
        step = (hashed >> 32) | 1
        least = 255
        for i, row in enumerate(self._rows):
            at = (hashed + i * step) & (_WIDTH - 1)
            count = row[at]
            if count < 255:
                count += 1
                row[at] = count
            least = min(least, count)
        self._added += 1
        if self._added >= _AGE:
            self._added = 0
            self._rows = [row.translate(_HALVED) for row in self._rows]
        return least
