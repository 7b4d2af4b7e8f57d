"""Reads messages of KV events: vLLM's and SGLang's (events as maps with `type`, or as lists) and a Mooncake master's.

A message is [time, [event, ...], rank].  What cannot be understood raises ValueError: the message counts as lost.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

GPU, CPU, DISK = "GPU", "CPU", "DISK"
MEDIA = (GPU, CPU, DISK)
_MEDIA = {"gpu": GPU, "cpu": CPU, "disk": DISK, "storage": DISK, "ssd": DISK}
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
_REMOVED = ("block_hashes", "medium")
_WHOLE_PREFIX = frozenset({None, "unknown", "full_attention", "mla_attention", "sink_full_attention"})

Hash = int | bytes


class Stored(NamedTuple):
    """Blocks in a row, on `medium`.  No `token_ids`: they are known by their hashes, if at all."""

    hashes: Sequence[Hash]
    parent: Hash | None
    token_ids: Sequence[int]
    block_size: int
    extra: Sequence[Sequence[object] | None]  # what else is hashed into each block
    medium: str
    group: int


class Removed(NamedTuple):
    """`medium` "": from all."""

    hashes: Sequence[Hash]
    medium: str
    group: int


class Cleared(NamedTuple):
    """Nothing is left on these."""

    media: tuple[str, ...]


Event = Stored | Removed | Cleared


class Message(NamedTuple):
    """`time` in its publisher's own unit."""

    time: float
    events: list[Event]


def decode(payload: bytes) -> Message:
    try:
        time, events, *_ = msgspec.msgpack.decode(payload)
        return Message(float(time), [event for one in events for event in _event(one)])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"not a message of KV events: {error}") from None


def _event(one: Any) -> list[Event]:
    if isinstance(one, list):
        kind, *values = one
        one = dict(zip(_STORED if kind == "BlockStored" else _REMOVED, values, strict=False))
    elif "event_type" in one:
        return _of_master(one)
    else:
        kind = one["type"]
    if kind == "AllBlocksCleared":
        return [Cleared((GPU,))]  # an engine speaks of its own cache; what a pool lost it tells block by block
    if kind not in ("BlockStored", "BlockRemoved") or one.get("kv_cache_spec_kind") not in _WHOLE_PREFIX:
        return []  # blocks of a sliding window, say, do not show that a prefix is there
    hashes, group = list(one["block_hashes"]), one.get("group_idx") or 0
    medium = _MEDIA.get(str(one.get("medium") or GPU).lower(), CPU)
    if kind == "BlockRemoved":
        return [Removed(hashes, medium, group)]
    lora = one.get("lora_name")
    extra = one.get("extra_keys") or [[lora] if lora else None] * len(hashes)
    tokens = one.get("token_ids") or ()
    size = int(one.get("block_size") or 0)
    if len(extra) != len(hashes) or (tokens and len(tokens) != size * len(hashes)):
        raise ValueError(f"{len(hashes)} blocks of {size} tokens, but {len(tokens)} tokens and {len(extra)} extra keys")
    return [Stored(hashes, one.get("parent_block_hash"), tokens, size, extra, medium, group)]


def _of_master(one: dict[str, Any]) -> list[Event]:
    kind, hashes = one["event_type"], list(one["seq_hashes"])
    medium = one.get("medium")
    if kind == "cleared":
        return [Cleared(MEDIA)]
    if not hashes:
        return []
    if kind == "stored":
        return [Stored(hashes, None, (), 0, [None] * len(hashes), _MEDIA.get(str(medium).lower(), CPU), 0)]
    if kind == "removed":
        return [Removed(hashes, _MEDIA.get(str(medium).lower(), CPU) if medium else "", 0)]
    return []
