"""Values that are blocks of an engine's KV cache: the calls of our own connectors.

They take what a connector has, the shape of its blocks and their numbers, instead of lists of addresses.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from mooncake.errors import ErrorCode
from mooncake.store.gets import get_steps
from mooncake.store.member import INVALID, Member, NotSetUpError
from mooncake.store.puts import store_steps
from mooncake.store.vectors import Cutting, parts_of
from mooncake.transfer.steps import overlap

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient
    from mooncake.client.put import PiecesOf
    from mooncake.rpc.messages import Found
    from mooncake.store.gets import VectorsOf
    from mooncake.transfer.blocks import BlockVector

_MANY = 128  # blocks: prepared in a millisecond, so that an engine's thread never waits longer for the interpreter lock
CUTTING = Cutting(16 << 20, 2, 512 << 20, _MANY)
TRANSFER_FAIL = int(ErrorCode.TRANSFER_FAIL)


class Blocks(Member):
    """Keys and blocks are as many, in the same order; a value is a block's bytes."""

    def put_from_blocks(self, keys: Sequence[str], blocks: "BlockVector") -> list[int]:
        """Store blocks: 0 or a negative code a key; what exists already is not copied."""
        try:
            client = self._joined()
        except NotSetUpError:
            return [INVALID] * len(keys)
        size = blocks.shape.block_bytes
        parts = _parts(client, blocks)
        stored = overlap(
            store_steps(
                client,
                list(keys[part]),
                [size] * len(keys[part]),
                _vectors(blocks.of(blocks.blocks[part])),
                None,
                checked=False,
                eager=len(parts) > 1,
            )
            for part in parts
        )
        return list(chain.from_iterable(stored))

    def get_into_blocks(self, keys: Sequence[str], blocks: "BlockVector") -> list[int]:
        """Copy values to blocks: 0 or a negative code a key; a value of another size is an error."""
        try:
            client = self._joined()
        except NotSetUpError:
            return [INVALID] * len(keys)
        size = blocks.shape.block_bytes

        def judge(found: "list[int | Found]") -> list[int]:
            return [each if isinstance(each, int) else 0 if each.size == size else TRANSFER_FAIL for each in found]

        def vectors(part: "BlockVector") -> "VectorsOf":
            return lambda chosen, _: _vectors(part.some(chosen))

        got = overlap(
            get_steps(client, keys[part], judge, vectors(blocks.of(blocks.blocks[part])))
            for part in _parts(client, blocks)
        )
        return [min(code, 0) for code in chain.from_iterable(got)]


def _parts(client: "StoreClient", blocks: "BlockVector") -> list[slice]:
    sizes = [blocks.shape.block_bytes] * len(blocks.blocks)
    return parts_of(client, sizes, int(blocks.shape.bases[0]), CUTTING)


def _vectors(blocks: "BlockVector") -> "PiecesOf":
    """All blocks, or some of them by their places."""
    return blocks.some
