"""Which rank of prefill sends which KV heads to which rank of decode.

With tensor parallel size S and K heads, rank r has heads [r·K/S, (r+1)·K/S); with more ranks than heads S/K of them
have the same one.  Both sides compute this alike, so a rank of prefill knows whom it has to wait for.
"""

from typing import NamedTuple


class Heads(NamedTuple):
    """Heads [first, end) of the model."""

    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first

    def of(self, whole: "Heads") -> "Heads":
        """The same, counted from the first of `whole`."""
        return Heads(self.first - whole.first, self.end - whole.first)


def heads_of(rank: int, size: int, heads: int) -> Heads:
    """What a rank of `size` holds of `heads`."""
    if size > heads:
        first = rank * heads // size
        return Heads(first, first + 1)
    return Heads(rank * heads // size, (rank + 1) * heads // size)


def sources(rank: int, size: int, prefill_size: int, heads: int) -> dict[int, Heads]:
    """For rank `rank` of decode's `size`: the ranks of prefill that send to it, and which heads."""
    if size == prefill_size:
        return {rank: heads_of(rank, size, heads)}
    wanted = heads_of(rank, size, heads)
    if prefill_size > heads:  # of those that have the same head, decode's ranks take turns
        same = prefill_size // heads
        return {head * same + rank % same: Heads(head, head + 1) for head in range(wanted.first, wanted.end)}
    each = heads // prefill_size
    found = {}
    for source in range(wanted.first // each, (wanted.end - 1) // each + 1):
        there = heads_of(source, prefill_size, heads)
        found[source] = Heads(max(wanted.first, there.first), min(wanted.end, there.end))
    return found


def idle_sources(rank: int, size: int, prefill_size: int, heads: int) -> list[int]:
    """The ranks of prefill that send to nobody, and hear from this rank of decode that nothing is wanted."""
    used = {source for each in range(size) for source in sources(each, size, prefill_size, heads)}
    return [source for source in range(prefill_size) if source not in used and source % size == rank]


def receivers(rank: int, size: int, decode_size: int, heads: int) -> list[int]:
    """The ranks of decode that rank `rank` of prefill's `size` hears from for each transfer."""
    wanting = [each for each in range(decode_size) if rank in sources(each, decode_size, size, heads)]
    return wanting or [rank % decode_size]
