"""The get family: values from the pool into fresh memory or to given addresses."""

from collections.abc import Callable, Generator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from mooncake.errors import ErrorCode, StoreError
from mooncake.rpc.messages import Found
from mooncake.store.buffers import BufferHandle, new_bytes
from mooncake.store.member import INVALID, Member, NotSetUpError
from mooncake.store.vectors import Lists, Vectors, is_sound, parts_of_lists, pieces_by_value, totals_of, trust_of
from mooncake.transfer.steps import finish, overlap

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient
    from mooncake.client.get import Located
    from mooncake.client.put import PiecesOf

VectorsOf = Callable[[Sequence[int], "list[Found]"], "PiecesOf"]
"""Where to read values to, given their indexes and what was found of them."""

Judge = Callable[["list[int | Found]"], list[int]]
"""What was found of a batch: for each key 0 if its value shall be read, or the code that the caller gets."""

TRANSFER_FAIL = int(ErrorCode.TRANSFER_FAIL)


class Gets(Member):
    """Calls that read values.  What they return is exactly what was put, or a miss, or an error."""

    def get(self, key: str) -> bytes:
        """The value, or b"" if it is not there."""
        made = b""

        def room(size: int) -> int:
            nonlocal made
            if size > self._buffer_size:
                return INVALID
            made, address = new_bytes(size)
            return address

        try:
            code = self._joined().gets.get_one(key, room, lambda *_: True)
        except NotSetUpError:
            return b""
        return made if code > 0 else b""

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """The values, b"" for what is not there.  [] gives [b""], as the C++ library does."""
        if not keys:
            return [b""]
        results = [b""] * len(keys)
        for i, value in self._get_owned(keys, new_bytes):
            results[i] = value
        return results

    def get_buffer(self, key: str) -> BufferHandle | None:
        """The value in memory of its own, or None."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """Values in memory of their own, None for what is not there."""
        results: list[BufferHandle | None] = [None] * len(keys)
        for i, handle in self._get_owned(keys, _new_handle):
            results[i] = handle
        return results

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Copy the value to an address with room for `size` bytes: the value's size, or a negative code."""
        try:
            client = self._joined()
        except NotSetUpError:
            return INVALID

        def room(needed: int) -> int:
            return buffer_ptr if needed <= size and buffer_ptr > 0 else INVALID

        return client.gets.get_one(key, room, lambda at, n: client.registered.covers_one(at, n, write=True))

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Copy values to addresses; sizes are capacities.  Bytes or a negative code a key."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID] * len(keys)

        def judge(found: "list[int | Found]") -> list[int]:
            return [
                each if isinstance(each, int) else 0 if each.size <= size and 0 < address < 1 << 63 else INVALID
                for each, address, size in zip(found, buffer_ptrs, sizes, strict=True)
            ]

        try:
            client = self._joined()
        except NotSetUpError:
            return [INVALID] * len(keys)

        def vectors(chosen: Sequence[int], founds: "list[Found]") -> "PiecesOf":
            return pieces_by_value([[buffer_ptrs[i]] for i in chosen], [[found.size] for found in founds])

        return finish(get_steps(client, keys, judge, vectors))

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Copy values to pieces; the pieces of a key must add up to exactly its size.  Bytes or a code a key."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID] * len(keys)
        try:
            client = self._joined()
        except NotSetUpError:
            return [INVALID] * len(keys)
        rooms = totals_of(all_sizes)
        parts = parts_of_lists(client, rooms, all_buffer_ptrs)
        got = overlap(
            self._fill_exactly(client, keys[part], all_buffer_ptrs[part], all_sizes[part], rooms[part])
            for part in parts
        )
        return list(chain.from_iterable(got))

    def _fill_exactly(
        self, client: "StoreClient", keys: Sequence[str], addresses: Lists, sizes: Lists, rooms: list[int]
    ) -> Generator[None, None, list[int]]:
        vectors = Vectors(addresses, sizes)

        def judge(found: "list[int | Found]") -> list[int]:
            all_sound = vectors.whole is not None
            return [
                each
                if isinstance(each, int)
                else 0
                if all_sound and room == each.size
                else self._judge_one(addresses[i], sizes[i], room, each.size)
                for i, (each, room) in enumerate(zip(found, rooms, strict=True))
            ]

        def chosen_vectors(chosen: Sequence[int], _: "list[Found]") -> "PiecesOf":
            if len(chosen) == len(keys):
                return pieces_by_value(addresses, sizes, vectors)
            return pieces_by_value([addresses[i] for i in chosen], [sizes[i] for i in chosen])

        return get_steps(client, keys, judge, chosen_vectors, vectors.make)

    @staticmethod
    def _judge_one(addresses: Sequence[int], sizes: Sequence[int], room: int, size: int) -> int:
        """Of a value of `size` bytes and its pieces, which add up to `room`."""
        if room == size and is_sound(addresses, sizes):
            return 0
        if len(addresses) != len(sizes):
            return TRANSFER_FAIL
        return TRANSFER_FAIL if room > size else INVALID

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Copy fragments of values: for buffer b and its key k, fragment f is all_sizes[b][k][f] bytes from
        all_src_offsets[b][k][f] of the value to all_dst_offsets[b][k][f] of the buffer, which must be registered.
        Bytes or a negative code a fragment, nested the same way."""
        from mooncake.store.ranges import get_ranges

        shape = [[[INVALID] * len(sizes) for sizes in by_key] for by_key in all_sizes]
        try:
            client = self._joined()
        except NotSetUpError:
            return shape
        return get_ranges(client, buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, shape)

    def _get_owned(self, keys: Sequence[str], allocate: Any) -> "list[tuple[int, Any]]":
        """(index, result) of what could be read, each into fresh memory from `allocate`(size)."""
        try:
            client = self._joined()
            located = client.gets.locate(list(keys))
        except (NotSetUpError, StoreError):
            return []
        held: list[tuple[int, Found, Any, int]] = []
        for i, found in enumerate(located.found):
            if not isinstance(found, int) and found.size <= self._buffer_size:
                held.append((i, found, *allocate(found.size)))
        if not held:
            client.gets.finish(located)
            return []
        vectors = pieces_by_value([[address] for _, _, _, address in held], [[found.size] for _, found, _, _ in held])
        names, founds = [keys[i] for i, *_ in held], [found for _, found, _, _ in held]
        codes = finish(_fetch(client, located, names, founds, vectors, checked=True))
        return [(i, result) for (i, _, result, _), code in zip(held, codes, strict=True) if not code]


def get_steps(
    client: "StoreClient",
    keys: Sequence[str],
    judge: Judge,
    vectors: VectorsOf,
    prepare: Callable[[], None] = lambda: None,
) -> Generator[None, None, list[int]]:
    """Read what `judge` says 0 to, to where `vectors` says; `prepare` is called while the master looks.  See
    transfer.steps."""
    if not keys:
        return []
    try:
        asked = client.gets.begin_locate(list(keys))
        yield
        prepare()
        yield
        located = asked()
    except StoreError as error:
        return [int(error.code)] * len(keys)
    try:
        results = judge(located.found)
        chosen: Sequence[int] = range(len(results))
        if any(results):
            chosen = [i for i, code in enumerate(results) if not code]
        founds = [found for i in chosen if not isinstance(found := located.found[i], int)]
        pieces = vectors(chosen, founds)
    except BaseException:
        client.gets.finish(located)
        raise
    if not founds:
        client.gets.finish(located)
        return results
    names = keys if len(chosen) == len(keys) else [keys[i] for i in chosen]
    codes = yield from _fetch(client, located, names, founds, pieces, checked=False)
    for i, found, code in zip(chosen, founds, codes, strict=True):
        results[i] = code or found.size
    return results


def _new_handle(size: int) -> tuple[BufferHandle, int]:
    handle = BufferHandle(size)
    return handle, handle.ptr()


def _fetch(
    client: "StoreClient",
    located: "Located",
    keys: Sequence[str],
    founds: "list[Found]",
    vectors: "PiecesOf",
    checked: bool,
) -> Generator[None, None, list[int]]:
    """Copy found values to their pieces, and hand the lease back whatever happens."""
    try:
        return (
            yield from client.gets.fetch_steps(
                [found.places for found in founds],
                vectors,
                located,
                trust_of(client, checked, write=True),
                client.gets.checks_of(keys, founds),
            )
        )
    finally:
        client.gets.finish_batch(located)
