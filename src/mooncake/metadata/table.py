"""What an HTTP metadata server keeps: values by key, in memory, within limits of number and size.

Entries whose writer gave a time to live go when it is over; others stay until somebody deletes them.
"""

from collections.abc import Callable, Iterator
from math import inf

LARGEST_VALUE = 1 << 20  # bytes
LONGEST_KEY = 4096  # characters
MOST_ENTRIES = 100_000
MOST_BYTES = 256 << 20
_SLICE = 1000  # entries looked at in one step of `sweep`


class TableFullError(Exception):
    """No further entry, or byte, is taken."""


class MetadataTable:
    """`clock` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float], entries: int = MOST_ENTRIES, size: int = MOST_BYTES) -> None:
        self._clock = clock
        self._most_entries, self._most_bytes = entries, size
        self._entries: dict[str, tuple[bytes, float]] = {}  # value, end
        self.size = 0  # bytes of keys and values

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> bytes | None:
        value, end = self._entries.get(key, (None, inf))
        if value is not None and end <= self._clock():
            self.remove(key)
            return None
        return value

    def put(self, key: str, value: bytes, ttl: float = inf) -> None:
        """Raises TableFullError."""
        former = self._entries.get(key)
        size = self.size + len(value) - len(former[0]) if former else self.size + len(key) + len(value)
        if (former is None and len(self._entries) >= self._most_entries) or size > self._most_bytes:
            raise TableFullError(
                f"the metadata server is full ({len(self._entries)} entries, {self.size} bytes; at most "
                f"{self._most_entries} and {self._most_bytes})"
            )
        self._entries[key] = (value, self._clock() + ttl)
        self.size = size

    def remove(self, key: str) -> bool:
        """Whether it was there."""
        value, _ = self._entries.pop(key, (None, 0.0))
        if value is None:
            return False
        self.size -= len(key) + len(value)
        return True

    def sweep(self, segments: set[str]) -> Iterator[None]:
        """Remove what is over, and every entry of the segments named; a step is one slice of the work."""
        keys = list(self._entries)
        for at in range(0, len(keys), _SLICE):
            for key in keys[at : at + _SLICE]:
                if self.get(key) is not None and segments and _segment_of(key) in segments:
                    self.remove(key)
            yield


def _segment_of(key: str) -> str:
    """The segment or server whose key this is; "" if it is none's."""
    for kind in ("/ram/", "/rpc_meta/"):
        _, found, name = key.partition(kind)
        if found:
            return name
    return ""
