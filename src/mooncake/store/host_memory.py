"""Host memory for engines that let a `mooncake_client` of their host do the networking (see docs/store.md).

With the C++ library it must be shared memory of that process; here every address can be given, so it is plain memory in
huge pages where the kernel has them.
"""

import ctypes
import mmap
import threading

_MADV_HUGEPAGE = 14

_blocks: dict[int, mmap.mmap] = {}  # by address, of all allocators: what is not freed lives as long as the process
_lock = threading.Lock()


def allocate(size: int) -> int:
    """Address of `size` fresh bytes; 0 if the machine has no memory left.  Raises RuntimeError for none at all."""
    if size <= 0:
        raise RuntimeError(f"{size} bytes of memory cannot be mapped; expected at least 1")
    try:
        block = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        return 0
    block.madvise(_MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    with _lock:
        _blocks[address] = block
    return address


def free(address: int) -> int:
    """0, or -1 if `address` is none that `allocate` gave."""
    with _lock:
        block = _blocks.pop(address, None)
    if block is None:
        return -1
    block.close()
    return 0


class MooncakeHostMemAllocator:
    """Memory by address, for engines that manage it themselves."""

    def alloc(self, size: int) -> int:
        """Address of `size` fresh bytes, 0 if there is no memory.  Raises RuntimeError for size 0."""
        return allocate(size)

    def free(self, address: int) -> int:
        """0; -1 for an address that alloc did not give."""
        return free(address)


_c_allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(lambda size: allocate(size) if size > 0 else 0)
_c_free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(lambda address, _: free(address or 0))


def get_alloc_func_addr() -> int:
    """Address of a C function `void *(size_t)` that allocates as MooncakeHostMemAllocator does."""
    return ctypes.cast(_c_allocate, ctypes.c_void_p).value or 0


def get_free_func_addr() -> int:
    """Address of its counterpart, `void (void *, size_t)`."""
    return ctypes.cast(_c_free, ctypes.c_void_p).value or 0
