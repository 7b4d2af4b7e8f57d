"""mooncake.async_store: every method as a coroutine too."""

import asyncio

import pytest

from mooncake.async_store import MooncakeDistributedStoreAsync
from mooncake.store import MooncakeDistributedStore


def test_methods_as_coroutines(master):
    async def use() -> None:
        store = MooncakeDistributedStoreAsync()
        assert isinstance(store, MooncakeDistributedStore)
        code = await store.async_setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 1 << 20, "tcp", "", master.address)
        assert code == 0
        assert await store.async_put(key="k", value=b"v") == 0
        assert await store.async_get("k") == store.get("k") == b"v"
        assert await asyncio.gather(*(store.async_put(f"k{i}", b"v") for i in range(50))) == [0] * 50
        assert asyncio.iscoroutinefunction(store.async_put)
        assert await store.async_close() == 0
        assert await store.async_get("k") == b""

    asyncio.run(use())


def test_other_names_are_unknown():
    store = MooncakeDistributedStoreAsync()
    for name in ("async_nothing", "nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(store, name)
