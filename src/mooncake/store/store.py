"""MooncakeDistributedStore: the names and results of the drop-in API over the store client.

Results are exactly the C++ library's: plain ints and lists, 0 or a negative code of `mooncake.errors.ErrorCode`,
b"" or None for what is not there.  Every call is synchronous, thread-safe and ends within its limit.  Nothing is
done here but checking arguments and shaping results.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mooncake.errors import ErrorCode, StoreError
from mooncake.rpc.messages import (
    Codes,
    Count,
    Exist,
    ExistReply,
    Found,
    GetReply,
    Query,
    Remove,
    RemoveAll,
    RemoveRegex,
)
from mooncake.store.buffers import BufferHandle, new_bytes, source_of
from mooncake.store.setup import SetupError, open_client
from mooncake.store.types import (
    Descriptor,
    MemoryDescriptor,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
)

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient
    from mooncake.client.get import Located
    from mooncake.client.put import PiecesOf, Trust
    from mooncake.rpc.messages import PutOptions

logger = logging.getLogger("mooncake.store")

INVALID = int(ErrorCode.INVALID_PARAMS)
EXISTS = int(ErrorCode.OBJECT_ALREADY_EXISTS)
TRANSFER_FAIL = int(ErrorCode.TRANSFER_FAIL)


class _NotSetUpError(Exception):
    """The store was never set up, or is closed."""


class MooncakeDistributedStore:
    """A client of a pool of KV-cache memory.  `setup` first; `close` leaves the pool."""

    def __init__(self) -> None:
        self._client: StoreClient | None = None
        self._buffer_size = 0
        self._lock = threading.Lock()

    # -- set-up and shutdown

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """Join the pool: setup(local_hostname, metadata_server, global_segment_size, local_buffer_size, protocol,
        rdma_devices, master_server_addr, engine=None, enable_ssd_offload=False, ssd_offload_path="",
        tenant_id="default", enable_client_http_server=False, client_http_port=9300), or setup(dict) with those names.

        Sizes are bytes (in the dict also text such as "64MB").  0, or a negative code; why is in the log.
        """
        with self._lock:
            self._leave()
            try:
                self._client = open_client(args, kwargs)
            except SetupError as error:
                logger.error("setup failed: %s", error)
                return int(error.code)
            self._buffer_size = self._client.config.buffer_size
        return 0

    def close(self) -> int:
        """Leave the pool; the values in our own segment disappear at once.  0, also the second time."""
        with self._lock:
            self._leave()
        return 0

    def health_check(self) -> int:
        """0 healthy, 1 not set up or closed, 2 the master cannot be reached."""
        try:
            client = self._joined()
        except _NotSetUpError:
            return 1
        return 0 if client.alive() else 2

    def get_hostname(self) -> str:
        """ "host:port", the name of this client and of its segment; "" before setup."""
        return self._client.name if self._client is not None else ""

    def transfer_stats(self) -> dict[str, int]:
        """Bytes moved so far by transport: "local" (our own segment), "shm" (same host), "tcp"."""
        return dict(self._client.attachments.moved) if self._client is not None else {}

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Declare memory that later calls will name addresses in.  0; INVALID_PARAMS for null, empty, overlapping or
        unmapped ranges."""
        try:
            reason = self._joined().registered.add(buffer_ptr, size)
        except _NotSetUpError:
            return INVALID
        if reason:
            logger.error("register_buffer: %s", reason)
            return INVALID
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Undo register_buffer of exactly this address."""
        try:
            return 0 if self._joined().registered.remove(buffer_ptr) else INVALID
        except _NotSetUpError:
            return INVALID

    # -- put

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
        """Store the concatenation of 1-D bytes-like parts.  No bytes at all: 0, and nothing is stored."""
        sources = []
        for part in parts:
            try:
                sources.append(source_of(part))
            except TypeError as error:
                raise RuntimeError(f"a part is not one-dimensional bytes-like: {error}") from None
        sources = [source for source in sources if source[1]]
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
        except _NotSetUpError:
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
        except _NotSetUpError:
            return [INVALID] * len(keys)
        options: PutOptions | None = None
        if config is not None:
            options = config.options(len(keys), same_node_allowed)
            if options is None:
                return [INVALID] * len(keys)
        totals = [sum(lengths) for lengths in sizes]
        good = [
            i
            for i, key in enumerate(keys)
            if key
            and 0 < totals[i] <= largest
            and len(addresses[i]) == len(sizes[i])
            and min(sizes[i]) >= 0
            and min(addresses[i]) > 0
        ]
        if len(good) == len(keys):
            return self._store(client, list(keys), totals, addresses, sizes, options, checked)
        codes = [INVALID] * len(keys)
        if good:
            if options is not None and options.groups:
                options.groups = [options.groups[i] for i in good]
            stored = self._store(
                client,
                [keys[i] for i in good],
                [totals[i] for i in good],
                [addresses[i] for i in good],
                [sizes[i] for i in good],
                options,
                checked,
            )
            for i, code in zip(good, stored, strict=True):
                codes[i] = code
        return codes

    @staticmethod
    def _store(
        client: "StoreClient",
        keys: list[str],
        totals: list[int],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        options: "PutOptions | None",
        checked: bool,
    ) -> list[int]:
        codes = client.puts.put(
            keys, totals, _pieces_of(addresses, sizes), options, _trust(client, checked, write=False)
        )
        return [0 if code == EXISTS else code for code in codes]

    # -- get

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
        except _NotSetUpError:
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
        except _NotSetUpError:
            return INVALID

        def room(needed: int) -> int:
            return buffer_ptr if needed <= size and buffer_ptr > 0 else INVALID

        return client.gets.get_one(key, room, lambda at, n: client.registered.covers_one(at, n, write=True))

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Copy values to addresses; sizes are capacities.  Bytes or a negative code a key."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID] * len(keys)

        def fits(i: int, size: int) -> int:
            return 0 if size <= sizes[i] and buffer_ptrs[i] > 0 else INVALID

        return self._get_many(keys, fits, buffer_ptrs)

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

        def fits(i: int, size: int) -> int:
            if len(all_buffer_ptrs[i]) != len(all_sizes[i]):
                return TRANSFER_FAIL
            room = sum(all_sizes[i])
            if room == size:
                return 0 if min(all_sizes[i]) >= 0 and min(all_buffer_ptrs[i]) > 0 else INVALID
            return TRANSFER_FAIL if room > size else INVALID

        return self._get_many(keys, fits, all_buffer_ptrs, all_sizes)

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
        except _NotSetUpError:
            return shape
        return get_ranges(client, buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, shape)

    def _get_owned(self, keys: Sequence[str], allocate: Any) -> "list[tuple[int, Any]]":
        """(index, result) of what could be read, each into fresh memory from `allocate`(size)."""
        try:
            client = self._joined()
            located = client.gets.locate(list(keys))
        except (_NotSetUpError, StoreError):
            return []
        held: list[tuple[int, Found, Any, int]] = []
        for i, found in enumerate(located.found):
            if not isinstance(found, int) and found.size <= self._buffer_size:
                held.append((i, found, *allocate(found.size)))
        if not held:
            client.gets.finish(located)
            return []
        codes = _fetch(
            client,
            located,
            [found for _, found, _, _ in held],
            [[address] for _, _, _, address in held],
            [[found.size] for _, found, _, _ in held],
            checked=True,
        )
        return [(i, result) for (i, _, result, _), code in zip(held, codes, strict=True) if not code]

    def _get_many(
        self, keys: Sequence[str], fits: Any, addresses: Sequence[Any], sizes: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """Read into given memory; without `sizes`, an address a key holds the whole value."""
        if not keys:
            return []
        try:
            client = self._joined()
            located = client.gets.locate(list(keys))
        except _NotSetUpError:
            return [INVALID] * len(keys)
        except StoreError as error:
            return [int(error.code)] * len(keys)
        results = [found if isinstance(found, int) else fits(i, found.size) for i, found in enumerate(located.found)]
        chosen = [i for i, code in enumerate(results) if not code]
        if not chosen:
            client.gets.finish(located)
            return results
        founds: list[Found] = [located.found[i] for i in chosen]  # type: ignore[misc]
        if sizes is None:
            where, lengths = [[addresses[i]] for i in chosen], [[found.size] for found in founds]
        else:
            where, lengths = [addresses[i] for i in chosen], [list(sizes[i]) for i in chosen]
        codes = _fetch(client, located, founds, where, lengths, checked=False)
        for i, found, code in zip(chosen, founds, codes, strict=True):
            results[i] = code or found.size
        return results

    # -- asking

    def is_exist(self, key: str) -> int:
        """1 there, 0 not, negative if the master cannot say.  A key found is leased."""
        try:
            return self._joined().rpc.call(Exist([key]), ExistReply).found[0]
        except _NotSetUpError:
            return INVALID
        except StoreError as error:
            return int(error.code)

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """As is_exist, for each key."""
        if not keys:
            return []
        try:
            return list(self._joined().rpc.call(Exist(list(keys)), ExistReply).found)
        except _NotSetUpError:
            return [INVALID] * len(keys)
        except StoreError as error:
            return [int(error.code)] * len(keys)

    def get_size(self, key: str) -> int:
        """Bytes of the value, or a negative code.  Grants a lease."""
        found = self._query([key])[0]
        return found if isinstance(found, int) else found.size

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Where the value's replicas lie; [] if it is not there.  Grants a lease."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """As get_replica_desc; only keys that are there."""
        return {
            key: [self._describe(found, i) for i in range(len(found.places))]
            for key, found in zip(keys, self._query(list(keys)), strict=True)
            if not isinstance(found, int)
        }

    def _query(self, keys: list[str]) -> "list[int | Found]":
        if not keys:
            return []
        try:
            return self._joined().rpc.call(Query(keys), GetReply).found
        except _NotSetUpError:
            return [INVALID] * len(keys)
        except StoreError as error:
            return [int(error.code)] * len(keys)

    def _describe(self, found: "Found", replica: int) -> ReplicaDescriptor:
        segment, offset, _ = found.places[replica][:3]
        descriptor = Descriptor()
        descriptor.size, descriptor.buffer_address = found.size, offset
        with contextlib.suppress(StoreError, _NotSetUpError):
            info = self._joined().attachments.info(segment)
            descriptor.transport_endpoint = info.tcp if info is not None else ""
        status = ReplicaStatus(found.states[replica]) if found.states else ReplicaStatus.COMPLETE
        return ReplicaDescriptor(status, MemoryDescriptor(descriptor))

    # -- removing

    def remove(self, key: str, force: bool = False) -> int:
        """0; OBJECT_NOT_FOUND; OBJECT_HAS_LEASE unless `force`; REPLICA_IS_NOT_READY while it is being written."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """As remove, for each key."""
        if not keys:
            return []
        try:
            return self._joined().rpc.call(Remove(list(keys), force), Codes).codes
        except _NotSetUpError:
            return [INVALID] * len(keys)
        except StoreError as error:
            return [int(error.code)] * len(keys)

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove every key in which the pattern is found; how many.  Leased ones only with `force`."""
        return self._count(RemoveRegex(regex_pattern, force))

    def remove_all(self, force: bool = False) -> int:
        """Remove every key; how many.  Leased ones only with `force`."""
        return self._count(RemoveAll(force))

    def _count(self, message: Any) -> int:
        try:
            return self._joined().rpc.call(message, Count).count
        except _NotSetUpError:
            return INVALID
        except StoreError as error:
            return int(error.code)

    # -- inside

    def _joined(self) -> "StoreClient":
        client = self._client
        if client is None:
            raise _NotSetUpError
        if client.pid != os.getpid():
            raise RuntimeError(
                f"this store was set up in process {client.pid} and is not usable in its forked child "
                f"{os.getpid()}; create and set up a new MooncakeDistributedStore here"
            )
        return client

    def _leave(self) -> None:
        client, self._client = self._client, None
        self._buffer_size = 0
        if client is not None and client.pid == os.getpid():
            client.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self._leave()


def _new_handle(size: int) -> tuple[BufferHandle, int]:
    handle = BufferHandle(size)
    return handle, handle.ptr()


def _trust(client: "StoreClient", checked: bool, write: bool) -> "Trust":
    if checked:
        return lambda _: True
    return lambda pieces: client.registered.covers(pieces, write)


def _pieces_of(addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> "PiecesOf":
    from mooncake.transfer.pieces import flatten

    def pieces_of(values: Sequence[int]) -> Any:
        if len(values) == len(addresses):
            return flatten(addresses, sizes)
        return flatten([addresses[i] for i in values], [sizes[i] for i in values])

    return pieces_of


def _fetch(
    client: "StoreClient",
    located: "Located",
    founds: "list[Found]",
    addresses: Sequence[Sequence[int]],
    sizes: Sequence[Sequence[int]],
    checked: bool,
) -> list[int]:
    """Copy found values to their pieces, and hand the lease back whatever happens."""
    try:
        return client.gets.fetch(
            [found.places for found in founds],
            _pieces_of(addresses, sizes),
            located.deadline,
            _trust(client, checked, write=True),
        )
    finally:
        client.gets.finish(located)
