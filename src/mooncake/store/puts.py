"""The put family: values from buffers and addresses into the pool."""

from collections.abc import Callable, Generator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from mooncake.errors import ErrorCode
from mooncake.store.buffers import source_of
from mooncake.store.member import INVALID, Member, NotSetUpError
from mooncake.store.types import ReplicateConfig
from mooncake.store.vectors import Vectors, is_sound, parts_of_lists, pieces_by_value, totals_of, trust_of
from mooncake.transfer.steps import finish, overlap

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient
    from mooncake.client.put import PiecesOf
    from mooncake.rpc.messages import PutOptions

EXISTS = int(ErrorCode.OBJECT_ALREADY_EXISTS)


class Puts(Member):
    """Calls that store values.  An existing key keeps its value, and the call succeeds."""

    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Store a buffer-protocol object (its element count in bytes: give bytes or uint8).  An existing key keeps
        its old value, and 0 is returned."""
        address, size, owner = source_of(value)
        if size > self._buffer_size:
            return INVALID
        code = self._put_one(key, address, size, config, checked=True)
        del owner  # until now it had to live
        return code

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Store `size` bytes at an address.  Size 0: 0, and nothing is stored."""
        if size == 0 and self._client is not None:
            return 0
        return self._put_one(key, buffer_ptr, size, config, checked=False)

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Store metadata bytes followed by data bytes as one value.  Errors come back as *positive* numbers."""
        pieces = [(metadata_buffer_ptr, metadata_size), (buffer_ptr, size)]
        pieces = [piece for piece in pieces if piece[1] != 0]
        if not pieces:
            return -INVALID
        return -self._put_many([key], [[p for p, _ in pieces]], [[n for _, n in pieces]], config)[0]

    def put_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """Store the concatenation of 1-D bytes-like parts.  No bytes at all: 0, and nothing is stored.

        Raises TypeError for a part without a buffer, RuntimeError for one that is not a row of bytes.
        """
        for part in parts:
            view = memoryview(part)
            if view.ndim != 1 or view.itemsize != 1:
                raise RuntimeError(
                    f"parts must be one-dimensional and bytes-like; this one is {view.format}{view.shape}"
                )
        sources = [source for source in map(source_of, parts) if source[1]]
        total = sum(size for _, size, _ in sources)
        if not total and self._client is not None:
            return 0
        if total > self._buffer_size:
            return INVALID
        where, sizes = [address for address, _, _ in sources], [size for _, size, _ in sources]
        return self._put_many([key], [where], [sizes], config, checked=True)[0]

    def put_batch(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None) -> int:
        """Store several values: 0, or the first error."""
        if not keys and not values:
            return 0
        if len(keys) != len(values):
            return INVALID
        sources = [source_of(value) for value in values]
        codes = self._put_many(
            keys,
            [[address] for address, _, _ in sources],
            [[size] for _, size, _ in sources],
            config,
            checked=True,
            largest=self._buffer_size,
        )
        return next((code for code in codes if code), 0)

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store values at addresses: a code a key."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID] * len(keys)
        return self._put_many(keys, [[p] for p in buffer_ptrs], [[n] for n in sizes], config)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store values made of pieces: all_buffer_ptrs[k], all_sizes[k] are the pieces of keys[k].  A code a key."""
        if self._client is None:
            return []
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID] * len(keys)
        return self._put_many(keys, all_buffer_ptrs, all_sizes, config, same_node_allowed=True)

    def _put_one(self, key: str, address: int, size: int, config: ReplicateConfig | None, checked: bool) -> int:
        try:
            client = self._joined()
        except NotSetUpError:
            return INVALID
        options: PutOptions | None = None
        if config is not None:
            options = config.options(1, same_node_allowed=False)
            if options is None:
                return INVALID
        if not key or size <= 0 or address <= 0:
            return INVALID
        trusted = checked or client.registered.covers_one(address, size, write=False)
        code = client.puts.put_one(key, size, address, options, trusted)
        return 0 if code == EXISTS else code

    def _put_many(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None,
        checked: bool = False,
        same_node_allowed: bool = False,
        largest: int = 1 << 62,
    ) -> list[int]:
        """`checked`: the addresses are those of Python objects, hence valid."""
        try:
            client = self._joined()
        except NotSetUpError:
            return [INVALID] * len(keys)
        options: PutOptions | None = None
        if config is not None:
            options = config.options(len(keys), same_node_allowed)
            if options is None:
                return [INVALID] * len(keys)
        totals = totals_of(sizes)
        parts = parts_of_lists(client, totals, addresses)
        if len(parts) == 1:
            return finish(self._put_steps(client, keys, totals, addresses, sizes, options, checked, largest))
        stored = overlap(
            self._put_steps(
                client,
                keys[part],
                totals[part],
                addresses[part],
                sizes[part],
                options.of(part) if options is not None else None,
                checked,
                largest,
                eager=True,
            )
            for part in parts
        )
        return list(chain.from_iterable(stored))

    def _put_steps(
        self,
        client: "StoreClient",
        keys: Sequence[str],
        totals: list[int],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        options: "PutOptions | None",
        checked: bool,
        largest: int,
        eager: bool = False,
    ) -> Generator[None, None, list[int]]:
        """Store a batch, or the part of one; see transfer.steps."""
        if all(keys) and (not totals or (min(totals) > 0 and max(totals) <= largest)):
            vectors = Vectors(addresses, sizes)
            whole = pieces_by_value(addresses, sizes, vectors)
            codes = yield from store_steps(client, list(keys), totals, whole, options, checked, vectors.make, eager)
            if vectors.whole is not None:
                return codes
        good = [
            i for i, key in enumerate(keys) if key and 0 < totals[i] <= largest and is_sound(addresses[i], sizes[i])
        ]
        codes = [INVALID] * len(keys)
        if good:
            if options is not None and options.groups:
                options.groups = [options.groups[i] for i in good]
            stored = yield from store_steps(
                client,
                [keys[i] for i in good],
                [totals[i] for i in good],
                pieces_by_value([addresses[i] for i in good], [sizes[i] for i in good]),
                options,
                checked,
            )
            for i, code in zip(good, stored, strict=True):
                codes[i] = code
        return codes


def store_steps(
    client: "StoreClient",
    keys: list[str],
    totals: list[int],
    vectors: "PiecesOf",
    options: "PutOptions | None",
    checked: bool,
    prepare: Callable[[], None] = lambda: None,
    eager: bool = False,
) -> Generator[None, None, list[int]]:
    """Store values whose arguments are all sound; a code a key.  See transfer.steps."""
    trust = trust_of(client, checked, write=False)
    codes = yield from client.puts.put_steps(keys, totals, vectors, options, trust, prepare, eager)
    return [0 if code == EXISTS else code for code in codes]
