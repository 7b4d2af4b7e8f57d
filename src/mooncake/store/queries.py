"""Asking the directory, and removing from it: calls that move no bytes of values."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mooncake.errors import StoreError
from mooncake.rpc.messages import (
    Codes,
    Count,
    Exist,
    ExistReply,
    Found,
    GetReply,
    Need,
    Prefix,
    PrefixReply,
    Query,
    Remove,
    RemoveAll,
    RemoveRegex,
)
from mooncake.store.member import INVALID, Member, NotSetUpError
from mooncake.store.types import Descriptor, MemoryDescriptor, ReplicaDescriptor, ReplicaStatus

MOST_KEYS = 1 << 16  # in one question
_Answer = TypeVar("_Answer")


class Queries(Member):
    """Calls about keys."""

    def is_exist(self, key: str) -> int:
        """1 there, 0 not, negative if the master cannot say.  A key found is leased."""
        try:
            return self._joined().rpc.call(Exist([key]), ExistReply).found[0]
        except NotSetUpError:
            return INVALID
        except StoreError as error:
            return int(error.code)

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """As is_exist, for each key."""
        return self._each(keys, lambda part: list(self._joined().rpc.call(Exist(part), ExistReply).found))

    def longest_prefix(self, keys: Sequence[str]) -> int:
        """How many of the first keys are there without a gap, negative if the master cannot say.  Those found are
        leased.  One round trip; the C++ library has no such call."""
        try:
            return self._joined().rpc.call(Prefix([Need([""])], [list(keys)]), PrefixReply).lengths[0]
        except NotSetUpError:
            return INVALID
        except StoreError as error:
            return int(error.code)

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
        return self._each(keys, lambda part: self._joined().rpc.call(Query(part), GetReply).found)

    def _describe(self, found: "Found", replica: int) -> ReplicaDescriptor:
        segment, offset, _ = found.places[replica][:3]
        status = ReplicaStatus(found.states[replica]) if found.states else ReplicaStatus.COMPLETE
        if segment < 0:
            return ReplicaDescriptor(status, None)
        descriptor = Descriptor()
        descriptor.size, descriptor.buffer_address = found.size, offset
        with contextlib.suppress(StoreError, NotSetUpError):
            info = self._joined().attachments.info(segment)
            descriptor.transport_endpoint = info.shown if info is not None else ""
        return ReplicaDescriptor(status, MemoryDescriptor(descriptor))

    # -- removing

    def remove(self, key: str, force: bool = False) -> int:
        """0; OBJECT_NOT_FOUND; OBJECT_HAS_LEASE unless `force`; REPLICA_IS_NOT_READY while it is being written."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """As remove, for each key."""
        return self._each(keys, lambda part: self._joined().rpc.call(Remove(part, force), Codes).codes)

    def _each(self, keys: Sequence[str], ask: Callable[[list[str]], list[_Answer]]) -> list[_Answer | int]:
        """The answers for all keys, asked for so many at a time that each question is answered within its limit.  A
        code in place of those that the master cannot give; when a question fails no other is asked."""
        answers: list[_Answer | int] = []
        try:
            for at in range(0, len(keys), MOST_KEYS):
                answers += ask(list(keys[at : at + MOST_KEYS]))
        except NotSetUpError:
            return [INVALID] * len(keys)
        except StoreError as error:
            answers += [int(error.code)] * (len(keys) - len(answers))
        return answers

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove every key in which the pattern is found; how many.  Leased ones only with `force`."""
        return self._count(RemoveRegex(regex_pattern, force))

    def remove_all(self, force: bool = False) -> int:
        """Remove every key; how many.  Leased ones only with `force`."""
        return self._count(RemoveAll(force))

    def _count(self, message: Any) -> int:
        try:
            return self._joined().rpc.call(message, Count).count
        except NotSetUpError:
            return INVALID
        except StoreError as error:
            return int(error.code)
