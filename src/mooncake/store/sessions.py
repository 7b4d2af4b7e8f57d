"""The session calls: one value written, or read, in several calls."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mooncake.errors import ErrorCode, StoreError
from mooncake.store.member import INVALID, Member, NotSetUpError
from mooncake.store.types import ReplicateConfig

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient
    from mooncake.client.put import Trust
    from mooncake.store.vectors import Lists


class Sessions(Member):
    """Put sessions and get sessions, by key.  On a store that was set up by setup_dummy all give INVALID_PARAMS, as
    those of the C++ library do."""

    def _holder(self, keys: Sequence[str]) -> "StoreClient | list[int]":
        """The client; without one, what the calls return."""
        try:
            client = self._joined()
        except NotSetUpError:
            return []
        return [INVALID] * len(keys) if client.config.is_dummy else client

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Room for values of these sizes, to be written in pieces.  A code a key: 0; OBJECT_ALREADY_EXISTS (which
        put turns into 0); INVALID_PARAMS, also if its session is open here; NO_AVAILABLE_HANDLE."""
        client = self._holder(keys)
        if isinstance(client, list):
            return client
        if len(keys) != len(sizes):
            return [INVALID] * len(keys)
        options = (config or ReplicateConfig()).options(len(keys), same_node_allowed=True)
        if options is None:
            return [INVALID] * len(keys)
        try:
            return client.put_sessions.start(list(keys), list(sizes), options)
        except StoreError as error:
            return [int(error.code)] * len(keys)
        except OSError:
            return [int(ErrorCode.NO_AVAILABLE_HANDLE)] * len(keys)

    def batch_put_from_multi_buffer_ranges(
        self, keys: Sequence[str], all_buffer_ptrs: "Lists", all_sizes: "Lists", all_dst_offsets: "Lists"
    ) -> list[int]:
        """Write pieces of open values: all_sizes[k][i] bytes from all_buffer_ptrs[k][i] to all_dst_offsets[k][i] of the
        value.  Bytes written a key, or a code; a piece that is written twice has the later bytes."""
        from mooncake.client.sessions import fragments_of

        client = self._holder(keys)
        if isinstance(client, list):
            return client
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_dst_offsets):
            return [INVALID] * len(keys)
        results = []
        for key, *lists in zip(keys, all_buffer_ptrs, all_sizes, all_dst_offsets, strict=True):
            fragments = fragments_of(*lists)
            written = INVALID
            if fragments is not None:
                written = client.put_sessions.write(key, fragments, _trust(client, write=False))
            results.append(written)
        return results

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Make the values visible; bytes that were not written are zeros.  A code a key; INVALID_PARAMS: not open."""
        client = self._holder(keys)
        return client if isinstance(client, list) else client.put_sessions.end(keys)

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Give the values up.  A code a key; INVALID_PARAMS: not open."""
        client = self._holder(keys)
        return client if isinstance(client, list) else client.put_sessions.revoke(keys)

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Hold values, under one read lease, to be read in pieces.  A code a key."""
        client = self._holder(keys)
        if isinstance(client, list) or not keys:
            return client if isinstance(client, list) else []
        try:
            return client.get_sessions.start(list(keys))
        except StoreError as error:
            return [int(error.code)] * len(keys)

    def batch_get_into_multi_buffer_ranges(
        self, keys: Sequence[str], all_buffer_ptrs: "Lists", all_sizes: "Lists", all_src_offsets: "Lists"
    ) -> list[int]:
        """Read pieces of held values: all_sizes[k][i] bytes from all_src_offsets[k][i] of the value to
        all_buffer_ptrs[k][i].  Bytes read a key, or a code: INVALID_PARAMS for what is not held or lies outside,
        LEASE_EXPIRED when the session has been open for longer than a lease lasts."""
        from mooncake.client.sessions import fragments_of

        client = self._holder(keys)
        if isinstance(client, list):
            return client
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_src_offsets):
            return [INVALID] * len(keys)
        fragments = [fragments_of(*lists) for lists in zip(all_buffer_ptrs, all_sizes, all_src_offsets, strict=True)]
        return client.get_sessions.read(keys, fragments, _trust(client, write=True))

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """Let the values go.  0; -1 when not set up."""
        client = self._holder(["one answer"])
        if isinstance(client, list):
            return client[0] if client else int(ErrorCode.INTERNAL_ERROR)
        client.get_sessions.end(keys)
        return 0


def _trust(client: "StoreClient", write: bool) -> "Trust":
    return lambda pieces: client.covers(pieces, write)
