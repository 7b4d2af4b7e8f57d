"""The store for asyncio programs: `await store.async_get(key)` runs `get` in the loop's default executor."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from mooncake.store import MooncakeDistributedStore


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """Every method M of the store also as a coroutine `async_M`, with the same arguments and results."""

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        kind, plain = type(self).__name__, name.removeprefix("async_")
        if plain == name:
            raise AttributeError(f"'{kind}' object has no attribute '{name}'")
        try:
            method = object.__getattribute__(self, plain)
        except AttributeError:
            raise AttributeError(f"'{kind}' object has no attribute '{name}' (nor '{plain}')") from None
        return _in_executor(method)


def _in_executor(method: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(method)
    async def run(*args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, functools.partial(method, *args, **kwargs))

    return run
