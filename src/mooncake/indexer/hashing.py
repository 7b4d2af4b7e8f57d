"""The hashes by which the indexer knows blocks: XXH3 of 64 bits, chained.

    block hash      of the block's tokens, 4 bytes each, little end first; then, if the engine hashes anything else
                    into the block (LoRA adapter, salt, images), MessagePack of that list
    sequence hash   of the first block: its block hash; of a later one: of the sequence hash before it and its own block
                    hash, 8 bytes each, little end first

They depend on nothing that differs between engines, so instances compare that hash their blocks in different ways.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import count
from struct import Struct
from sys import byteorder

import msgspec
from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4
_AT_ONCE = 64
_PAIR = Struct("<QQ").pack


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Raises OverflowError or TypeError if these are no numbers of 32 bits."""
    tokens = array("I", token_ids)
    if byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


class Hasher:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def block(self, tokens: bytes, extra: Sequence[object] | None) -> int:
        """Of one block's `tokens` (as `token_bytes` gives them)."""
        if extra:
            tokens += msgspec.msgpack.encode(list(extra))
        return xxh3_64_intdigest(tokens, self._seed)

    def sequence(self, before: int | None, block: int) -> int:
        """Of a block after the one with sequence hash `before`; None: the first."""
        return block if before is None else xxh3_64_intdigest(_PAIR(before, block), self._seed)


class Chain:
    """The sequence hashes of a prompt's whole blocks, worked out as far as they are asked for."""

    def __init__(self, hasher: Hasher, tokens: bytes, block_size: int, lora_name: str, salt: str) -> None:
        self._hasher = hasher
        self._tokens = tokens
        self._block_size, self._names = block_size, (lora_name, salt)
        self._others: dict[int, Chain] = {}
        self._step = block_size * TOKEN_BYTES
        self._extra = [lora_name] if lora_name else []
        self._salt = [salt] if salt else []
        self._parts: list[list[int]] = []
        self._end = len(tokens) // self._step * self._step
        self._at = 0
        self._last: int | None = None

    def in_blocks_of(self, size: int) -> Chain:
        """The same prompt in blocks of so many tokens."""
        if size == self._block_size:
            return self
        if size not in self._others:
            self._others[size] = Chain(self._hasher, self._tokens, size, *self._names)
        return self._others[size]

    def parts(self) -> Iterator[list[int]]:
        """The hashes, some at a time."""
        for number in count():
            if number == len(self._parts):
                if self._at >= self._end:
                    return
                self._parts.append([self._next() for _ in range(min(_AT_ONCE, (self._end - self._at) // self._step))])
            yield self._parts[number]

    def _next(self) -> int:
        at, self._at = self._at, self._at + self._step
        extra = self._extra if at else self._extra + self._salt  # the salt is in the first block alone
        self._last = self._hasher.sequence(self._last, self._hasher.block(self._tokens[at : self._at], extra))
        return self._last
