"""The upsert family: as the puts, but a value that is there is replaced.

The old value can be read until the new one is whole, unless there is no other room than its own.  Pins and the group
stay as they were.
"""

from collections.abc import Sequence
from typing import Any

from mooncake.rpc.messages import PutOptions
from mooncake.store.member import INVALID
from mooncake.store.puts import Puts
from mooncake.store.types import ReplicateConfig


class Replacing(ReplicateConfig):
    """A configuration whose puts replace what is there."""

    def __init__(self, config: ReplicateConfig | None) -> None:
        super().__init__()
        for name in self._FIELDS if config is not None else ():
            setattr(self, name, getattr(config, name))

    def options(self, count: int, same_node_allowed: bool) -> PutOptions | None:
        options = super().options(count, same_node_allowed)
        if options is not None:
            options.upsert = True
        return options


class Upserts(Puts):
    """Calls that replace values."""

    def upsert(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """As put, replacing the value that is there.  INVALID_PARAMS also for `group_ids` other than its group;
        OBJECT_HAS_REPLICATION_TASK while it is copied or moved."""
        return self.put(key, value, Replacing(config))

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """As put_from, replacing."""
        return self.put_from(key, buffer_ptr, size, Replacing(config))

    def upsert_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """As put_parts, replacing."""
        return self.put_parts(key, *parts, config=Replacing(config))

    def upsert_batch(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None) -> int:
        """As put_batch, replacing: 0, or the first error."""
        return self.put_batch(keys, values, Replacing(config))

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """As batch_put_from, replacing: a code a key.  Of a key that is named twice the last value stays."""
        last = {key: i for i, key in enumerate(keys)}
        if len(last) == len(keys) or not len(keys) == len(buffer_ptrs) == len(sizes):
            return self.batch_put_from(keys, buffer_ptrs, sizes, Replacing(config))
        some = list(last.values())
        replacing = Replacing(config)
        if replacing.group_ids is not None:
            if len(replacing.group_ids) != len(keys):
                return [INVALID] * len(keys)
            replacing.group_ids = [replacing.group_ids[i] for i in some]
        codes = self.batch_put_from(list(last), [buffer_ptrs[i] for i in some], [sizes[i] for i in some], replacing)
        by_key = dict(zip(last, codes, strict=True))
        return [by_key[key] for key in keys]
