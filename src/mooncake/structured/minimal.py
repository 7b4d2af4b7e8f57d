"""The calls that batches and bundles are made of, for a store that has only put, get and remove.

Values are copied once more on each way, and ranges are cut from whole values: it is for stores of one's own (a double
in tests, another system), not for MooncakeDistributedStore, which has all of the calls.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from mooncake.errors import ErrorCode

_CALLS = ("batch_put_from_multi_buffers", "batch_get_into", "get_into_ranges", "get_batch", "batch_remove")
_REGISTRATION = ("register_buffer", "unregister_buffer")


def complete(store: Any) -> Any:
    """The store itself if it has all calls, else one that makes them of its put, get and remove.  Raises TypeError for
    what does not have even those."""
    lacking = [name for name in ("put", "get", "remove") if not callable(getattr(store, name, None))]
    if lacking:
        raise TypeError(f"a {type(store).__name__} is no store: it has no {', '.join(lacking)}")
    whole = all(callable(getattr(store, name, None)) for name in (*_CALLS, *_REGISTRATION))
    return store if whole else MinimalStore(store)


class MinimalStore:
    """What `complete` promises, over put(key, value[, config]), get(key) and remove(key, force).  A get that raises
    KeyError, or gives nothing, is a miss."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, value: Any, config: Any = None) -> int:
        given = () if config is None else (config,)
        return self._store.put(key, value, *given) or 0

    def get(self, key: str) -> bytes:
        try:
            return bytes(self._store.get(key) or b"")
        except KeyError:
            return b""

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Any = None,
    ) -> list[int]:
        """Up to the first that fails: what comes after it is as if it had failed alike."""
        codes: list[int] = []
        for key, addresses, sizes in zip(keys, all_buffer_ptrs, all_sizes, strict=True):
            value = b"".join(ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True))
            code = self.put(key, value, config)
            if code:
                return [*codes, *[code] * (len(keys) - len(codes))]
            codes.append(0)
        return codes

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        return [self._into(key, ptr, size) for key, ptr, size in zip(keys, buffer_ptrs, sizes, strict=True)]

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        given = zip(buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, strict=True)
        return [
            [self._cut(base, *one) for one in zip(keys, targets, sources, sizes, strict=True)]
            for base, keys, targets, sources, sizes in given
        ]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        return [self._remove(key, force) for key in keys]

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Nothing reads or writes memory on its own: there is nothing to tell anybody."""
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        return 0

    def _into(self, key: str, ptr: int, size: int) -> int:
        value = self.get(key)
        if not value:
            return ErrorCode.OBJECT_NOT_FOUND
        if len(value) > size:
            return ErrorCode.INVALID_PARAMS
        ctypes.memmove(ptr, value, len(value))
        return len(value)

    def _cut(
        self, base: int, key: str, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        value = self.get(key)
        codes: list[int] = []
        for target, at, size in zip(targets, sources, sizes, strict=True):
            if not value:
                codes.append(ErrorCode.OBJECT_NOT_FOUND)
            elif at + size > len(value):
                codes.append(ErrorCode.INVALID_PARAMS)
            else:
                ctypes.memmove(base + target, value[at : at + size], size)
                codes.append(size)
        return codes

    def _remove(self, key: str, force: bool) -> int:
        try:
            return self._store.remove(key, force) or 0
        except KeyError:
            return ErrorCode.OBJECT_NOT_FOUND
