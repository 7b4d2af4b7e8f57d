"""Groups of a model's layers, each with a block table of its own: what a request needs of a group to go on at a place.

Tokens are counted in three sizes.  A group's *block* is what one entry of its table holds.  A *unit* is a multiple of
every group's block, and requests go on from the pool at ends of units only.  A *grain* divides every group's block:
one hash a grain names the blocks of all groups, because vLLM chains its hashes (that of a block's last part names all
tokens up to the block's end).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mooncake.errors import ConfigError
from mooncake.rpc.messages import Need


class Group(NamedTuple):
    """`block_size`: tokens.  `span`: how many of the last tokens before a place a request that goes on there needs
    blocks of; 0: of all (full attention).  `states`: a block holds the one state at its end, not keys and values."""

    number: int
    block_size: int
    span: int
    states: bool

    def first_needed(self, tokens: int) -> int:
        """The first block that a request needs which goes on behind `tokens`."""
        return max(0, tokens - self.span) // self.block_size if self.span else 0


class Groups:
    """All groups of a model, and its sizes in tokens."""

    def __init__(self, groups: Sequence[Group], unit: int, hash_size: int, lag: int) -> None:
        """`hash_size` divides the groups' blocks, these divide `unit`.  `lag`: how many last units of a prompt are
        neither saved nor loaded, 1 if a speculator writes a block's last place only with the next block."""
        self.all = tuple(groups)
        self.unit = unit
        self.lag = lag
        self.grain = math.gcd(*(group.block_size for group in groups))
        self.hash_size = hash_size

    @staticmethod
    def of(kv_cache_config: Any, unit: int, hash_size: int, lag: int) -> "Groups":
        groups = [
            Group(i, group.kv_cache_spec.block_size, span_of(group.kv_cache_spec), holds_states(group.kv_cache_spec))
            for i, group in enumerate(kv_cache_config.kv_cache_groups)
        ]
        return Groups(groups, unit, hash_size, lag)

    def hashed(self, request: Any) -> int:
        """How many of a request's tokens have hashes."""
        return len(request.block_hashes) * self.hash_size

    def hash_at(self, request: Any, end: int) -> bytes:
        """That which names a request's tokens up to `end`, a multiple of a unit."""
        value: bytes = request.block_hashes[end // self.hash_size - 1]
        return value

    def hashes(self, request: Any, start: int, end: int, size: int) -> list[bytes]:
        """Those that name a request's blocks of `size` tokens from token `start` to `end`, which they divide."""
        each = self.hash_size
        found: list[bytes] = request.block_hashes[(start + size) // each - 1 : end // each : size // each]
        return found

    def grains_of(self, group: Group, first: int, blocks: range) -> slice:
        """Where in hashes of grains, which begin at token `first`, those of a group's `blocks` are."""
        size, grain = group.block_size, self.grain
        return slice(
            ((blocks.start + 1) * size - first) // grain - 1, (blocks.stop * size - first) // grain, size // grain
        )

    def needs(self, heads: Sequence[Sequence[str]]) -> list[Need]:
        """What the master is asked to find, in grains; `heads`: by group, how its keys begin on all workers."""
        merged: dict[tuple[int, int, int], list[str]] = {}
        for group, some in zip(self.all, heads, strict=True):
            size = group.block_size
            kind = size // self.grain, -(-group.span // size), self.lag * self.unit // size if group.span else 0
            merged.setdefault(kind, []).extend(some)
        return [Need(list(dict.fromkeys(some)), *kind) for kind, some in merged.items() if some]

    def useful(self, group: Group, blocks: range) -> range | list[int]:
        """Those of `blocks` that can be needed at the end of some unit."""
        size = group.block_size
        each, needed = self.unit // size, -(-group.span // size)
        if not group.span or needed >= each:
            return blocks
        return [block for block in blocks if block % each >= each - needed]


def layer_specs(spec: Any) -> list[Any]:
    """The specifications of a group's layers, which vLLM wraps if they differ."""
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def holds_states(spec: Any) -> bool:
    return type(layer_specs(spec)[0]).__name__ == "MambaSpec"


def span_of(spec: Any) -> int:
    """See `Group`.  Raises ConfigError for kinds that are not supported."""
    spans = {_span(each) for each in layer_specs(spec)}
    if len(spans) > 1:
        raise ConfigError(f"layers with different windows in one group ({sorted(spans)} tokens)")
    return spans.pop()


def _span(spec: Any) -> int:
    kind = type(spec).__name__
    if kind in ("FullAttentionSpec", "MLAAttentionSpec"):
        return 0
    if kind == "SlidingWindowSpec" and spec.sliding_window > 1:
        return int(spec.sliding_window) - 1 + int(getattr(spec, "extra_retained_tokens", 0))
    if kind == "MambaSpec":
        if spec.mamba_cache_mode == "align":
            return 1
        raise ConfigError(f"mamba_cache_mode {spec.mamba_cache_mode} (pass --mamba-cache-mode align)")
    raise ConfigError(f"a KV cache of kind {kind}")
