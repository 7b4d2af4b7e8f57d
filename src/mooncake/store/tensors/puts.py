"""Storing tensors: torch's, or header and data at an address (`_from`).

`put_` keeps a value that is there, `upsert_` replaces it; `pub_` takes a ReplicateConfig.  What cannot be stored (no
tensor, an element type or a division that there is none for) gives INVALID_PARAMS.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

from mooncake.store.member import INVALID
from mooncake.store.tensors import plans
from mooncake.store.tensors.local import Local, from_address, from_torch, header_at
from mooncake.store.tensors.plans import Plan
from mooncake.store.types import ReplicateConfig
from mooncake.store.upserts import Replacing, Upserts

Planner = Callable[[str, Local], Plan | None]


class TensorPuts(Upserts):
    """Whole tensors, and the shards of all ranks of one tensor axis (`_with_tp`)."""

    def put_tensor(self, key: str, tensor: Any) -> int:
        """Store a torch tensor, from the memory of any device."""
        return self._put_tensors([key], [tensor], None)[0]

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """As put_tensor, a code a key."""
        return self._put_tensors(keys, tensors_list, None)

    def pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """As put_tensor, placed as `config` says; its preferred_segments, if any, must be one a replica."""
        return self.batch_pub_tensor([key], [tensor], config)[0]

    def batch_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        """As pub_tensor, a code a key."""
        return self._put_tensors(keys, tensors_list, config) if _may_publish(config) else [INVALID] * len(keys)

    def upsert_tensor(self, key: str, tensor: Any) -> int:
        """As put_tensor, replacing."""
        return self._put_tensors([key], [tensor], Replacing(None))[0]

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """As upsert_tensor, a code a key."""
        return self._put_tensors(keys, tensors_list, Replacing(None))

    def upsert_pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """As pub_tensor, replacing."""
        return self.batch_upsert_pub_tensor([key], [tensor], config)[0]

    def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        """As upsert_pub_tensor, a code a key."""
        if not _may_publish(config):
            return [INVALID] * len(keys)
        return self._put_tensors(keys, tensors_list, Replacing(config))

    # -- from addresses: a header and its data, exactly `size` bytes

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Store a header and its data that lie at an address of host memory."""
        return self.batch_put_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """As put_tensor_from, a code a key; if one is no tensor, nothing is stored."""
        return self._put_addresses(keys, buffer_ptrs, sizes, None)

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """As put_tensor_from, replacing."""
        return self.batch_upsert_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """As upsert_tensor_from, a code a key."""
        return self._put_addresses(keys, buffer_ptrs, sizes, Replacing(None))

    # -- all shards of one tensor axis.  tp_rank says nothing: the caller has the whole tensor

    def put_tensor_with_tp(self, key: str, tensor: Any, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> int:
        """Cut a tensor into `tp_size` equal parts along a dimension and store each as `<key>_tp_<rank>`."""
        return self.batch_put_tensor_with_tp([key], [tensor], tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """As put_tensor_with_tp, a code a key; if one is no tensor, nothing is stored."""
        return self.batch_pub_tensor_with_tp(base_keys, tensors_list, None, tp_rank, tp_size, split_dim)

    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Any,
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """As put_tensor_with_tp, placed as `config` says."""
        return self.batch_pub_tensor_with_tp([key], [tensor], config, tp_rank, tp_size, split_dim)[0]

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """As pub_tensor_with_tp, a code a key."""
        if not _may_publish(config) or any(from_torch(tensor) is None for tensor in tensors_list):
            return [INVALID] * len(base_keys)
        return self._put_tensors(base_keys, tensors_list, config, _tp(tp_size, split_dim))

    def put_tensor_with_tp_from(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """As put_tensor_with_tp, of the whole tensor at an address."""
        return self.batch_put_tensor_with_tp_from([key], [buffer_ptr], [size], tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """As put_tensor_with_tp_from, a code a key."""
        if tp_size <= 1:
            return self._put_addresses(base_keys, buffer_ptrs, sizes, None)
        return self._put_copies(base_keys, buffer_ptrs, sizes, None, [_tp(tp_size, split_dim)] * len(base_keys))

    # -- inside

    def _put_tensors(
        self,
        keys: Sequence[str],
        tensors: Sequence[Any],
        config: ReplicateConfig | None,
        plan_of: Planner = plans.whole,
    ) -> list[int]:
        return self._put_planned(keys, tensors, config, [plan_of] * len(keys))

    def _put_planned(
        self,
        keys: Sequence[str],
        tensors: Sequence[Any],
        config: ReplicateConfig | None,
        planners: Sequence[Planner],
    ) -> list[int]:
        if len(keys) != len(tensors):
            return [INVALID] * len(keys)
        made: list[Plan | None] = []
        for key, tensor, plan_of in zip(keys, tensors, planners, strict=True):
            local = from_torch(tensor)
            made.append(None if local is None else plan_of(key, local))
        return self._put_plans(made, config)

    def _put_addresses(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], config: ReplicateConfig | None
    ) -> list[int]:
        if not len(keys) == len(addresses) == len(sizes) or any(
            header_at(address, size) is None for address, size in zip(addresses, sizes, strict=True)
        ):
            return [INVALID] * len(keys)
        return self.batch_put_from(keys, addresses, sizes, config)

    def _put_copies(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None,
        planners: Sequence[Planner],
    ) -> list[int]:
        """As _put_addresses, of what has to be cut."""
        if not len(keys) == len(addresses) == len(sizes):
            return [INVALID] * len(keys)
        locals_ = [from_address(address, size) for address, size in zip(addresses, sizes, strict=True)]
        made = [
            None if local is None else plan_of(key, local)
            for key, local, plan_of in zip(keys, locals_, planners, strict=True)
        ]
        return [INVALID] * len(keys) if None in locals_ else self._put_plans(made, config)

    def _put_plans(self, made: Sequence[Plan | None], config: ReplicateConfig | None) -> list[int]:
        """Store all values of all plans in one batch; a code a plan: 0, or that of its first value that failed."""
        values = [value for plan in made for value in plan or ()]
        if not values:
            return [INVALID] * len(made)
        if config is not None and config.group_ids is not None:
            if len(config.group_ids) != len(made):
                return [INVALID] * len(made)
            groups, config = config.group_ids, copy(config)
            config.group_ids = [group for plan, group in zip(made, groups, strict=True) for _ in plan or ()]
        pieces = [value.pieces() for value in values]
        trusted = not any(value.on_device for value in values)
        codes = iter(
            self._put_many([v.key for v in values], [a for a, _ in pieces], [n for _, n in pieces], config, trusted)
        )
        results = []
        for plan in made:
            mine = [next(codes) for _ in plan or ()]
            results.append(next((code for code in mine if code), 0) if plan else INVALID)
        return results


def _tp(size: int, dim: int) -> Planner:
    return partial(_tp_shards, size, dim)


def _tp_shards(size: int, dim: int, key: str, local: Local) -> Plan | None:
    return plans.tp_shards(key, local, size, dim)


def _may_publish(config: Any) -> bool:
    if config is None:
        return True
    return isinstance(config, ReplicateConfig) and len(config.preferred_segments) in (0, config.replica_num)
