"""BufferPool: registered memory that is leased for one transfer after another, instead of being registered each time.

A region is made and registered when it is first needed, kept when its lease ends, and given back when the pool is
closed or needs its bytes for a region of another size.
"""

import ctypes
import mmap
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from mooncake.store.store import MooncakeDistributedStore

_PAGE = mmap.PAGESIZE


class _Region:
    """`size` bytes of registered memory, at a multiple of the pool's alignment."""

    def __init__(self, store: "MooncakeDistributedStore", size: int, alignment: int) -> None:
        self.size = size
        spare = alignment if alignment > _PAGE else 0
        self.mapping = mmap.mmap(-1, size + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        self.address = -(-start // alignment) * alignment
        self.offset = self.address - start
        self._store = store
        code = store.register_buffer(self.address, size)
        if code:
            raise RuntimeError(f"a buffer of {size} bytes cannot be registered (code {code})")

    @property
    def is_viewed(self) -> bool:
        """Whether somebody still holds a view of its memory."""
        try:
            self.mapping.resize(len(self.mapping))  # does nothing but look: Python forbids it while there are views
        except BufferError:
            return True
        return False

    def close(self) -> None:
        self._store.unregister_buffer(self.address)
        self.mapping.close()


class BufferLease:
    """Registered memory for the holder alone, until `release`, the end of its `with` block, or of the object."""

    def __init__(self, pool: "BufferPool", region: _Region, size: int) -> None:
        self._pool = pool
        self._region: _Region | None = region
        self._size = size

    @property
    def ptr(self) -> int:
        """Address of the first byte."""
        return self._leased().address

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    @property
    def buffer(self) -> memoryview:
        """The memory, writable.  No view may be left when the lease is released."""
        region = self._leased()
        return memoryview(region.mapping)[region.offset : region.offset + self._size]

    def release(self) -> None:
        """Hand the memory back.  Raises RuntimeError while views of it exist; again: nothing."""
        region = self._region
        if region is None:
            return
        if region.is_viewed:
            raise RuntimeError("cannot release buffer while exported views exist")
        self._region = None
        self._pool._take_back(region)

    def _leased(self) -> _Region:
        if self._region is None:
            raise RuntimeError("buffer lease is closed")
        return self._region

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        region, self._region = getattr(self, "_region", None), None
        if region is not None and not sys.is_finalizing():
            self._pool._drop(region) if region.is_viewed else self._pool._take_back(region)


class BufferPool:
    """Leases of registered memory.

    `max_bytes`: the most that leases may hold beyond the store's local_buffer_size; 0: no limit.  Regions are powers
    of two from `min_size_class` on up to `max_size_class`, larger ones as large as asked.  `max_regions` counts those
    that are leased or kept.  When there is no room, `acquire` waits if `block_on_exhaustion`, for `default_timeout`
    seconds (None: for as long as it takes).  Raises RuntimeError for what cannot be.
    """

    def __init__(
        self,
        store: Any,
        max_bytes: int = 0,
        min_size_class: int = 65536,
        max_size_class: int | None = None,
        alignment: int = 8 << 20,
        block_on_exhaustion: bool = True,
        default_timeout: float | None = None,
        max_regions: int | None = None,
        prewarm_size: int | None = None,
        prewarm_count: int = 0,
    ) -> None:
        _check_unsigned(
            max_bytes=max_bytes, min_size_class=min_size_class, alignment=alignment, prewarm_count=prewarm_count
        )
        self._store = member_of(store, "BufferPool")
        local = self._store._buffer_size
        if not local:
            raise RuntimeError("BufferPool requires a store configured with a local buffer")
        if not min_size_class or not alignment:
            raise RuntimeError("min_size_class and alignment must be positive")
        if alignment & (alignment - 1) or alignment < ctypes.sizeof(ctypes.c_void_p):
            raise RuntimeError("alignment must be a power of two and at least sizeof(void*)")
        self._largest = max(local, max_bytes) if max_bytes else 1 << 62
        self._capacity = local + max_bytes if max_bytes else 1 << 62
        self._min_class, self._max_class = min_size_class, max_size_class
        self._alignment = alignment
        self._blocks = block_on_exhaustion
        self._timeout = default_timeout
        self._max_regions = max_regions or 1 << 62
        self._kept: list[_Region] = []
        self._held = 0  # bytes of all regions, leased and kept
        self._regions = 0
        self._leased = 0  # regions
        self._closed = False
        self._changed = threading.Condition(threading.RLock())  # a lease may end in the midst of one of our own calls
        if prewarm_size is not None and prewarm_count:
            self.prewarm(prewarm_size, prewarm_count)

    def acquire(self, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """Lease `size` bytes.  Raises RuntimeError: larger than the pool may ever be; exhausted (now if `block` is
        False, or for `timeout` seconds); closed."""
        _check_unsigned(size=size)
        blocks = self._blocks if block is None else block
        timeout = self._timeout if timeout is None else timeout
        if timeout is not None and timeout < 0:
            raise RuntimeError("timeout must be non-negative")
        if size > self._largest:
            raise RuntimeError("requested buffer size exceeds pool capacity")
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if self._closed:
                    raise RuntimeError("buffer pool is closed")
                region = self._find(self._class_of(size))
                if region is not None:
                    self._leased += 1
                    return BufferLease(self, region, size)
                left = None if deadline is None else deadline - time.monotonic()
                if not blocks or (left is not None and left <= 0):
                    raise RuntimeError("buffer pool is exhausted")
                self._changed.wait(left)

    def buffer(self, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """As acquire, for a `with` statement."""
        return self.acquire(size, block, timeout)

    def prewarm(self, size: int, count: int) -> None:
        """Make `count` regions of `size` bytes ahead of use, as far as there is room for them."""
        _check_unsigned(size=size, count=count)
        with self._changed:
            if self._closed:
                raise RuntimeError("buffer pool is closed")
            for _ in range(count):
                length = self._class_of(size)
                if not self._has_room(length):
                    return
                self._kept.append(self._make(length))

    def close(self) -> None:
        """Unregister and free all memory.  Raises RuntimeError while leases are live; again: nothing."""
        with self._changed:
            if self._leased:
                raise RuntimeError("cannot close buffer pool with active leases")
            self._closed = True
            while self._kept:
                self._free(self._kept.pop())
            self._changed.notify_all()

    # -- inside

    def _class_of(self, size: int) -> int:
        length = self._min_class
        while length < size:
            length *= 2
        if self._max_class is not None and length > self._max_class:
            length = size
        length = max(length, 1)
        return length if length <= self._capacity else size

    def _find(self, length: int) -> _Region | None:
        for i, region in enumerate(self._kept):
            if region.size == length:
                return self._kept.pop(i)
        while not self._has_room(length) and self._kept:
            self._free(self._kept.pop(0))
        return self._make(length) if self._has_room(length) else None

    def _has_room(self, length: int) -> bool:
        return self._held + length <= self._capacity and self._regions < self._max_regions

    def _make(self, length: int) -> _Region:
        region = _Region(self._store, length, self._alignment)
        self._held += length
        self._regions += 1
        return region

    def _free(self, region: _Region) -> None:
        self._held -= region.size
        self._regions -= 1
        region.close()

    def _take_back(self, region: _Region) -> None:
        with self._changed:
            self._leased -= 1
            self._kept.append(region)
            self._changed.notify_all()

    def _drop(self, region: _Region) -> None:
        """Its lease was forgotten while views exist: the memory lives as long as they do."""
        with self._changed:
            self._leased -= 1
            self._held -= region.size
            self._regions -= 1
            self._store.unregister_buffer(region.address)
            self._changed.notify_all()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for region in getattr(self, "_kept", ()):
                region.close()


def _check_unsigned(**numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise TypeError(f"{name} is {number!r}; expected a whole number, 0 or more")


def _get_pyclient_from_wrapper(wrapper: Any) -> Any:
    """The store behind a wrapper."""
    return wrapper._get_pyclient_capsule()


def member_of(store: Any, whose: str) -> "MooncakeDistributedStore":
    """The set-up store behind `store`, or behind a wrapper of it.  Raises RuntimeError in the name of `whose`."""
    from mooncake.store.store import MooncakeDistributedStore

    if not isinstance(store, MooncakeDistributedStore) and hasattr(store, "_get_pyclient_capsule"):
        store = _get_pyclient_from_wrapper(store)
    if store is None or (isinstance(store, MooncakeDistributedStore) and store.health_check() == 1):
        raise RuntimeError("MooncakeDistributedStore is not initialized")
    if not isinstance(store, MooncakeDistributedStore):
        raise RuntimeError(
            f"{whose} store parameter must be a MooncakeDistributedStore or a wrapper that implements "
            "_get_pyclient_capsule()"
        )
    return store
