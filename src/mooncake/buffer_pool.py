"""The buffer pool under the name that the C++ wheel has it by."""

from mooncake.store.buffer_pool import BufferPool

RegisteredBufferPool = BufferPool

__all__ = ["BufferPool", "RegisteredBufferPool"]
