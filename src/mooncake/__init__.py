"""A pool of KV-cache memory shared by inference engines: a drop-in for Mooncake in pure Python.

Users import from `mooncake.store`, `mooncake.engine` and `mooncake.mooncake_config`; importing this package alone
loads nothing and starts nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake.buffer_pool import BufferPool, RegisteredBufferPool

__all__ = ["BufferPool", "RegisteredBufferPool"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from mooncake import buffer_pool

        return getattr(buffer_pool, name)
    raise AttributeError(f"module 'mooncake' has no attribute '{name}'")
