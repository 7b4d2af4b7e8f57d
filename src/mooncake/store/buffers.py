"""The results of gets that return memory: `bytes` and BufferHandle, filled by address without a second copy."""

import ctypes
import mmap
from typing import Any, Self

_HUGE_FROM = 4 << 20  # bytes; below it the pages are few
_PAGE = mmap.PAGESIZE
_MADV_HUGEPAGE = 14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_allocate = ctypes.pythonapi.PyBytes_FromStringAndSize
_allocate.restype = ctypes.py_object
_allocate.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.restype = ctypes.c_void_p
_address_of.argtypes = [ctypes.py_object]


def new_bytes(size: int) -> tuple[bytes, int]:
    """A fresh `bytes` of `size` whose content is not set yet, and its address.

    CPython's C interface allows filling a bytes object made from NULL before anybody else sees it.  Large ones
    get huge pages: otherwise most of the time goes into faulting 4 KiB pages in.
    """
    made: bytes = _allocate(None, size)
    address: int = _address_of(made)
    if size >= _HUGE_FROM:
        _advise_huge(address, size)
    return made, address


def _advise_huge(address: int, size: int) -> None:
    start = -(-address // _PAGE) * _PAGE
    _libc.madvise(start, (address + size - start) // _PAGE * _PAGE, _MADV_HUGEPAGE)


class BufferHandle(mmap.mmap):
    """A value in memory of its own, freed with the handle: `ptr()`, `size()`, len(), writable buffer protocol."""

    def __new__(cls, size: int) -> Self:
        handle = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE_FROM:
            handle.madvise(_MADV_HUGEPAGE)
        return handle

    def ptr(self) -> int:
        """Address of the first byte."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def size(self) -> int:
        """Bytes."""
        return len(self)


def source_of(value: Any) -> tuple[int, int, Any]:
    """(address, count, what keeps it alive) of a buffer-protocol object.  `count` is its number of *elements*: as in
    the C++ library, give bytes or uint8.  Raises TypeError for text and other things that are no buffer."""
    if isinstance(value, bytes):
        return _address_of(value), len(value), value
    if isinstance(value, str):
        raise TypeError("a str has no buffer; encode it first")
    view = memoryview(value)
    if not view.contiguous:
        raise TypeError("the buffer is not contiguous")
    count = view.nbytes // (view.itemsize or 1)
    if not count:
        return 0, 0, view
    flat = view.cast("B")
    if view.readonly:
        import numpy as np

        return int(np.frombuffer(flat, np.uint8).ctypes.data), count, view
    return ctypes.addressof(ctypes.c_char.from_buffer(flat)), count, view
