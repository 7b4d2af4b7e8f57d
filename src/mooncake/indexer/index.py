"""What every instance holds, and how much of a prompt that is.

    Links    engine's hash of a block → its sequence hash: a fact about tokens, whoever holds the block now
    Holding  of one rank of one instance: what it has said that it stored and has not said that it removed
    Index    all of both, in bounded memory: where there is too much, what is oldest is forgotten

What is forgotten, or was never heard of, costs a worse route and nothing else.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from mooncake.indexer.events import CPU, DISK, GPU, MEDIA, Cleared, Event, Hash, Removed, Stored
from mooncake.indexer.hashing import TOKEN_BYTES, Hasher, token_bytes


class Prefix(Protocol):
    def parts(self) -> Iterable[list[int]]:
        """The sequence hashes, some at a time."""

    def in_blocks_of(self, size: int) -> Prefix:
        """The same prompt in blocks of so many tokens."""


class Known(list[int]):
    """Sequence hashes that were given: of blocks of whatever size."""

    def in_blocks_of(self, size: int) -> Known:
        return self

    def parts(self) -> Iterable[list[int]]:
        return (self,)


class Match(NamedTuple):
    """Blocks from a prompt's beginning that are there: on any medium of one rank, on each rank's GPU, in the
    instance's memory, on its disk."""

    longest: int
    gpu: dict[int, int]
    cpu: int
    disk: int


class Holding:
    """Use it through its `Index`.  `unlinked`: blocks stored whose tokens could not be known.

    A model's layers may be in several groups with blocks of their own: a prefix is there as far as all have it.
    `groups` by medium: how often each sequence hash is there; once heard of they stay, so that one that has lost all
    its blocks counts.  `sizes`: tokens of their blocks."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[int, dict[int, int]]] = {
            medium: {} for medium in MEDIA
        }  # sequence hash → how often
        self.sizes: dict[int, int] = {}
        self.tables: dict[tuple[int, str], dict[Hash, int]] = {}  # (group, medium) → block → sequence hash
        self.unlinked = 0

    def __len__(self) -> int:
        return sum(map(len, self.tables.values()))

    def add(self, group: int, medium: str, block: Hash, sequence: int) -> bool:
        """Whether it was not there."""
        table = self.tables.setdefault((group, medium), {})
        if block in table:
            return False
        table[block] = sequence
        present = self.groups[medium].setdefault(group, {})
        present[sequence] = present.get(sequence, 0) + 1
        return True

    def remove(self, group: int, medium: str, block: Hash) -> bool:
        """Whether it was there."""
        sequence = self.tables.get((group, medium), {}).pop(block, None)
        if sequence is None:
            return False
        present = self.groups[medium][group]
        left = present[sequence] - 1
        if left:
            present[sequence] = left
        else:
            del present[sequence]
        return True

    def holds(self, medium: str) -> bool:
        return any(self.groups[medium].values())

    def place(self, group: int, medium: str) -> dict[int, int] | None:
        """What there is of `group`.  Beside a GPU who tells of one group alone speaks of all."""
        groups = self.groups[medium]
        return groups.get(0) if medium != GPU and groups.keys() == {0} else groups.get(group)


class Index:
    """At most `most_blocks` blocks of all holdings together, and as many links."""

    def __init__(self, seed: int, most_blocks: int) -> None:
        self.hasher = Hasher(seed)
        self.blocks = 0
        self.forgotten = 0
        self._most = most_blocks
        self._links: dict[Hash, int] = {}
        self._holdings: set[Holding] = set()

    def join(self) -> Holding:
        holding = Holding()
        self._holdings.add(holding)
        return holding

    def leave(self, holding: Holding) -> None:
        self.clear(holding)
        self._holdings.discard(holding)

    def clear(self, holding: Holding, media: Container[str] = MEDIA) -> None:
        for (group, medium), table in list(holding.tables.items()):
            if medium in media:
                self.blocks -= len(table)
                del holding.tables[group, medium]
                holding.groups[medium][group] = {}

    def apply(self, holding: Holding, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Stored):
                self._store(holding, event)
            elif isinstance(event, Removed):
                for block in event.hashes:
                    for medium in (event.medium,) if event.medium else MEDIA:
                        self.blocks -= holding.remove(event.group, medium, block)
            elif isinstance(event, Cleared):
                self.clear(holding, event.media)

    def sequence_of(self, block: Hash) -> int | None:
        """The sequence hash of what an engine calls `block`; a number that no engine has named is one itself."""
        known = self._links.get(block)
        return block if known is None and isinstance(block, int) else known

    def _store(self, holding: Holding, event: Stored) -> None:
        if event.token_ids:
            holding.sizes[event.group] = event.block_size
        sequences = self._linked(event) if event.token_ids else [self.sequence_of(block) for block in event.hashes]
        for block, sequence in zip(event.hashes, sequences, strict=True):
            if sequence is None:
                holding.unlinked += 1
            else:
                self.blocks += holding.add(event.group, event.medium, block, sequence)
        if self.blocks > self._most:
            self._forget_oldest()

    def _linked(self, event: Stored) -> Sequence[int | None]:
        """The blocks' sequence hashes, which are noted; None where the block before is not known."""
        before = None
        if event.parent is not None:
            before = self._links.get(event.parent)
            if before is None:
                return [None] * len(event.hashes)
        tokens, step, links = token_bytes(event.token_ids), event.block_size * TOKEN_BYTES, self._links
        sequences: list[int | None] = []
        for i, block in enumerate(event.hashes):
            known = links.pop(block, None)  # said before: by another instance, or with more of what it was made from
            if known is None:
                own = self.hasher.block(tokens[i * step : (i + 1) * step], event.extra[i])
                known = self.hasher.sequence(before, own)
            links[block] = before = known
            sequences.append(before)
        if len(links) > self._most:
            for block in list(islice(links, len(links) // 64 + 1)):
                del links[block]
        return sequences

    def _forget_oldest(self) -> None:
        """A part of the largest holding's oldest."""
        largest = max(self._holdings, key=len)
        (group, medium), table = max(largest.tables.items(), key=lambda entry: len(entry[1]))
        for block in list(islice(table, len(table) // 64 + 1)):
            largest.remove(group, medium, block)
            self.blocks -= 1
            self.forgotten += 1


def match(prompt: Prefix, ranks: Mapping[int, Holding], block_size: int) -> Match:
    """How much of `prompt` the ranks of one instance hold, in blocks of `block_size` tokens."""
    holdings = list(ranks.values())
    gpu = {rank: _length(prompt, [holding], (GPU,), block_size) for rank, holding in ranks.items()}
    cpu, disk = (_length(prompt, holdings, (medium,), block_size) for medium in (CPU, DISK))
    longest = max(gpu.values(), default=0)
    if any(holding.holds(medium) for holding in holdings for medium in (CPU, DISK)):
        longest = max(_length(prompt, holdings, MEDIA, block_size, own) for own in holdings)
    return Match(longest, gpu, cpu, disk)


def _length(
    prompt: Prefix, holdings: Sequence[Holding], media: Sequence[str], block_size: int, own: Holding | None = None
) -> int:
    """Blocks from the beginning that every group of layers has, on any of `media`; of GPUs only on that of `own`, if
    that is given.  Groups may have blocks of other sizes."""
    of = [(h, medium) for h in holdings for medium in media if own in (None, h) or medium != GPU]
    groups = sorted({group for holding, medium in of for group in holding.groups[medium]})
    shortest: int | None = None
    for group in groups:
        size = next((h.sizes[group] for h, _ in of if h.sizes.get(group)), block_size)
        places = [place for holding, medium in of if (place := holding.place(group, medium))]
        tokens = _blocks(prompt.in_blocks_of(size), places) * size
        shortest = tokens if shortest is None else min(shortest, tokens)
        if not shortest:
            return 0
    return (shortest or 0) // block_size


def _blocks(prompt: Prefix, places: Sequence[dict[int, int]]) -> int:
    """Blocks from the beginning each of which is in one of `places`."""
    if not places:
        return 0
    length, (place, *others) = 0, places
    for some in prompt.parts():
        for sequence in some:
            if sequence not in place and not any(sequence in other for other in others):
                return length
            length += 1
    return length
