"""What is stored of a tensor: values by key, each a header and data, and perhaps a manifest."""

from typing import Any, NamedTuple

from mooncake.store.buffers import source_of
from mooncake.store.tensors.header import Header
from mooncake.store.tensors.layout import (
    TP,
    Axes,
    Axis,
    axes_of,
    layout_manifest_key,
    pack_manifest,
    shard_key,
    tp_of,
    with_tp,
    writer_axis,
    writer_key,
    writer_manifest_key,
)
from mooncake.store.tensors.local import Local, cut


class Value(NamedTuple):
    """`head` bytes followed by `size` bytes at an address that is valid while `owner` lives."""

    key: str
    head: bytes
    address: int = 0
    size: int = 0
    owner: Any = None
    on_device: bool = False

    def pieces(self) -> tuple[list[int], list[int]]:
        """Addresses and lengths."""
        head = source_of(self.head)[0]
        if not self.size:
            return [head], [len(self.head)]
        return [head, self.address], [len(self.head), self.size]


Plan = list[Value]


def whole(key: str, local: Local) -> Plan:
    """The tensor under its own key."""
    header = Header(local.header.dtype, local.header.shape, local.header.shape)
    return [_value(key, local, header)]


def tp_shards(key: str, local: Local, size: int, dim: int) -> Plan | None:
    """All tensor shards; None if the dimension cannot be divided so."""
    if size <= 1:
        return whole(key, local)
    axis = Axis(TP, 0, size, dim)
    return _all_ranks(key, local, (axis,), axis)


def for_worker(key: str, local: Local, parallelism: Any, writer: Any) -> Plan | None:
    """What the worker stores: with one tensor axis the tensor is its shard, with more axes the whole, of which it takes
    its shard.  None for what cannot be."""
    try:
        if writer is not None:
            return None if parallelism is not None else _writers_part(key, local, writer_axis(writer))
        if parallelism is None:
            return whole(key, local)
        axes = axes_of(parallelism)
    except ValueError:
        return None
    tp = tp_of(axes)
    if tp is None:
        return [_value(shard_key(key, axes), local, _sharded(local, local.header.shape, axes, -1))]
    shape = local.header.shape
    if tp.split_dim >= len(shape):
        return None
    if len(axes) == 1:
        extent = shape[tp.split_dim] * tp.size
        total = (*shape[: tp.split_dim], extent, *shape[tp.split_dim + 1 :])
        header = _sharded(local, total, axes, tp.split_dim)
        return [_value(shard_key(key, axes), local, header), _manifest(layout_manifest_key(key), header, tp)]
    part = cut(local, tp.split_dim, tp.rank, tp.size)
    if part is None:
        return None
    header = _sharded(part, shape, axes, tp.split_dim)
    return [_value(shard_key(key, axes), part, header), _manifest(layout_manifest_key(key), header, tp)]


def for_all_workers(key: str, local: Local, parallelism: Any, writer: Any) -> Plan | None:
    """As for_worker, of a whole tensor: the shards of all ranks of the tensor axis."""
    if writer is not None or parallelism is None:
        return for_worker(key, local, parallelism, writer)
    try:
        axes = axes_of(parallelism)
    except ValueError:
        return None
    tp = tp_of(axes)
    if tp is None:
        return for_worker(key, local, parallelism, None)
    return _all_ranks(key, local, axes, tp)


def _all_ranks(key: str, local: Local, axes: Axes, tp: Axis) -> Plan | None:
    plan: Plan = []
    for rank in range(tp.size):
        part = cut(local, tp.split_dim, rank, tp.size)
        if part is None:
            return None
        these = with_tp(axes, tp._replace(rank=rank))
        header = _sharded(part, local.header.shape, these, tp.split_dim)
        plan.append(_value(shard_key(key, these), part, header))
    return plan


def _writers_part(key: str, local: Local, axis: Axis) -> Plan | None:
    part = cut(local, axis.split_dim, axis.rank, axis.size)
    if part is None:
        return None
    header = _sharded(part, local.header.shape, (axis,), axis.split_dim)
    return [_value(writer_key(key, axis), part, header), _manifest(writer_manifest_key(key), header, axis)]


def _sharded(local: Local, total: tuple[int, ...], axes: Axes, split_dim: int) -> Header:
    shape = local.header.shape
    shards = tuple(axis.shard(shape[split_dim] if axis.split_dim >= 0 else 0) for axis in axes)
    return Header(local.header.dtype, shape, total, shards)


def _value(key: str, local: Local, header: Header) -> Value:
    return Value(key, header.pack(), local.address, header.data_size, local.owner, local.on_device)


def _manifest(key: str, header: Header, axis: Axis) -> Value:
    return Value(key, pack_manifest(header, axis))
