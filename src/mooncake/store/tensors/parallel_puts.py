"""Storing what one worker of several has of a tensor (`_with_parallelism`).

`parallelism` is any object like TensorParallelism.  With a single tensor axis the tensor given is the worker's shard;
with more axes it is the whole, of which the worker's shard is taken; header and data at an address (`_from`) are always
the whole, of which the shards of all tensor ranks are stored.  `writer_partition` is any object with rank, size and
split_dim: the worker stores its part of a tensor that all writers have whole.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from mooncake.store.member import INVALID
from mooncake.store.tensors import plans
from mooncake.store.tensors.local import Local
from mooncake.store.tensors.plans import Plan
from mooncake.store.tensors.puts import Planner, TensorPuts
from mooncake.store.types import ReplicateConfig
from mooncake.store.upserts import Replacing


class ParallelTensorPuts(TensorPuts):
    """Shards of workers."""

    def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: Any,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """0, or a negative code; INVALID_PARAMS for a division that cannot be."""
        return self._put_planned([key], [tensor], config, [_worker(parallelism, writer_partition)])[0]

    def batch_put_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Any],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        """As put_tensor_with_parallelism; the divisions come as lists, one a key.  A code a key."""
        planners = _planners(plans.for_worker, len(keys), parallelisms, writer_partitions)
        if planners is None:
            return [INVALID] * len(keys)
        return self._put_planned(keys, tensors_list, config, planners)

    def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: Any,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """As put_tensor_with_parallelism, replacing."""
        return self.put_tensor_with_parallelism(key, tensor, parallelism, Replacing(config), writer_partition)

    def batch_upsert_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Any],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        """As batch_put_tensor_with_parallelism, replacing."""
        return self.batch_put_tensor_with_parallelism(
            keys, tensors_list, parallelisms, Replacing(config), writer_partitions
        )

    def put_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """As put_tensor_with_parallelism, of the whole tensor at an address."""
        planners = [partial(_swapped, plans.for_all_workers, parallelism, writer_partition)]
        return self._put_copies([key], [buffer_ptr], [size], config, planners)[0]

    def batch_put_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        """As put_tensor_with_parallelism_from; the divisions come as lists.  A code a key."""
        planners = _planners(plans.for_all_workers, len(keys), parallelisms, writer_partitions)
        if planners is None:
            return [INVALID] * len(keys)
        return self._put_copies(keys, buffer_ptrs, sizes, config, planners)

    def upsert_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """As put_tensor_with_parallelism_from, replacing."""
        return self.put_tensor_with_parallelism_from(
            key, buffer_ptr, size, parallelism, Replacing(config), writer_partition
        )

    def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        """As batch_put_tensor_with_parallelism_from, replacing."""
        return self.batch_put_tensor_with_parallelism_from(
            keys, buffer_ptrs, sizes, parallelisms, Replacing(config), writer_partitions
        )


def _worker(parallelism: Any, writer: Any) -> Planner:
    return partial(_swapped, plans.for_worker, parallelism, writer)


def _planners(plan_of: Any, count: int, parallelisms: Any, writers: Any) -> list[Planner] | None:
    """One a key; None if the lists are none, or of another length."""
    columns = []
    for given in (parallelisms, writers):
        column = [None] * count if given is None else given
        if not isinstance(column, list | tuple) or len(column) != count:
            return None
        columns.append(column)
    return [partial(_swapped, plan_of, *pair) for pair in zip(*columns, strict=True)]


def _swapped(plan_of: Any, parallelism: Any, writer: Any, key: str, local: Local) -> Plan | None:
    made: Plan | None = plan_of(key, local, parallelism, writer)
    return made
