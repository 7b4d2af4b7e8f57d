"""Reading what one worker needs of a tensor (`_with_parallelism`), however its writers had divided it.

`target` is any object like ReadTarget.  A shard that was stored just so is read as it is; another one is cut out of the
shards that there are, whose division is found in a manifest or in their headers.
"""

from collections.abc import Sequence
from typing import Any

from mooncake.store.tensors.gets import TensorGets
from mooncake.store.tensors.header import SIZE, Header
from mooncake.store.tensors.layout import (
    Axes,
    Axis,
    axes_of,
    layout_manifest_key,
    shard_key,
    tp_of,
    unpack_manifest,
    with_tp,
    writer_key,
    writer_manifest_key,
)
from mooncake.store.tensors.local import Local, cut, join, take, to_torch, torch_at, write_to


class ParallelTensorGets(TensorGets):
    """Shards for workers."""

    def get_tensor_with_parallelism(self, key: str, target: Any = None) -> Any:
        """The tensor, or None; without a target that of the key itself."""
        return to_torch(self._for_target(key, target))

    def batch_get_tensor_with_parallelism(self, keys: Sequence[str], targets: Any = None) -> list[Any]:
        """As get_tensor_with_parallelism; the targets come as a list, one a key."""
        each = _each(targets, len(keys))
        if each is None:
            return [None] * len(keys)
        return [self.get_tensor_with_parallelism(key, target) for key, target in zip(keys, each, strict=True)]

    def get_tensor_with_parallelism_into(self, key: str, buffer_ptr: int, size: int, target: Any = None) -> Any:
        """As get_tensor_with_parallelism, with header and data at an address with room for `size` bytes."""
        local = self._for_target(key, target)
        if local is None or not write_to(local, buffer_ptr, size):
            return None
        return torch_at(local.header, buffer_ptr + SIZE)

    def batch_get_tensor_with_parallelism_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], targets: Any = None
    ) -> list[Any]:
        """As get_tensor_with_parallelism_into, for each key."""
        each = _each(targets, len(keys))
        if each is None or not len(keys) == len(buffer_ptrs) == len(sizes):
            return [None] * len(keys)
        return [
            self.get_tensor_with_parallelism_into(*arguments)
            for arguments in zip(keys, buffer_ptrs, sizes, each, strict=True)
        ]

    # -- inside

    def _for_target(self, key: str, target: Any) -> Local | None:
        if target is None:
            return self._locals([key])[0]
        mode, parallelism = getattr(target, "mode", None), getattr(target, "parallelism", None)
        try:
            axes = None if parallelism is None else axes_of(parallelism)
        except ValueError:
            return None
        if mode == "as_stored":
            return self._locals([key])[0] if axes is None else None
        if mode == "full":
            return self._full(key, axes)
        return self._shard(key, axes) if mode == "shard" and axes is not None else None

    def _full(self, key: str, axes: Axes | None) -> Local | None:
        if axes is not None:
            tp = tp_of(axes)
            return None if tp is None else self._whole_of_shards(key, axes, self._division(key, axes, tp))
        whole = self._locals([key])[0]
        if whole is not None:
            return whole
        division = self._manifest(writer_manifest_key(key))
        if division is None:
            return None
        return self._join([writer_key(key, division._replace(rank=rank)) for rank in range(division.size)], division)

    def _shard(self, key: str, axes: Axes) -> Local | None:
        tp = tp_of(axes)
        stored = self._locals([shard_key(key, axes)])[0]
        if tp is None:
            return stored
        if stored is not None and _is_cut_so(stored.header, tp):
            return stored
        part = None
        division = self._division(key, axes, tp)
        if division.split_dim == tp.split_dim:
            part = self._part_of_shards(key, axes, division, tp)
        else:
            whole = self._whole_of_shards(key, axes, division)
            part = None if whole is None else cut(whole, tp.split_dim, tp.rank, tp.size)
        if part is None and len(axes) == 1:
            part = self._part_of_writers(key, tp)
        if part is None:
            return None
        return part._replace(header=_header_of_shard(part.header, axes, tp))

    def _division(self, key: str, axes: Axes, tp: Axis) -> Axis:
        """How the tensor axis was cut when the shards were stored; as asked for, if nothing says so."""
        known = self._manifest(layout_manifest_key(key))
        if known is not None:
            return known
        first = self._locals([shard_key(key, with_tp(axes, tp._replace(rank=0)))])[0]
        for axis in first.header.axes if first is not None else ():
            if axis.kind == tp.kind and axis.split_dim >= 0:
                return Axis(tp.kind, 0, axis.size, axis.split_dim)
        return tp

    def _manifest(self, key: str) -> Axis | None:
        raw = self.get_buffer(key)
        return None if raw is None else unpack_manifest(bytes(raw))

    def _whole_of_shards(self, key: str, axes: Axes, division: Axis) -> Local | None:
        return self._join(_keys(key, axes, division, range(division.size)), division)

    def _part_of_shards(self, key: str, axes: Axes, division: Axis, tp: Axis) -> Local | None:
        """The part of `tp` from those shards that it lies in."""
        some = _covering(division.size, tp)
        return _part(self._join(_keys(key, axes, division, some), division), division.size, some, tp)

    def _part_of_writers(self, key: str, tp: Axis) -> Local | None:
        division = self._manifest(writer_manifest_key(key))
        if division is None or division.split_dim != tp.split_dim:
            return None
        some = _covering(division.size, tp)
        keys = [writer_key(key, division._replace(rank=rank)) for rank in some]
        return _part(self._join(keys, division), division.size, some, tp)

    def _join(self, keys: list[str], division: Axis) -> Local | None:
        """The shards side by side; None if one is missing or cut otherwise."""
        parts = []
        for local in self._locals(keys):
            if local is None or not _is_cut_so(local.header, division, of_any_rank=True):
                return None
            parts.append(local)
        return join(parts, division.split_dim)


def _each(targets: Any, count: int) -> list[Any] | None:
    """One target a key; None if they are no list of that length."""
    if targets is None:
        return [None] * count
    return list(targets) if isinstance(targets, list | tuple) and len(targets) == count else None


def _keys(key: str, axes: Axes, division: Axis, ranks: range) -> list[str]:
    return [shard_key(key, with_tp(axes, division._replace(rank=rank))) for rank in ranks]


def _covering(count: int, tp: Axis) -> range:
    """Which of `count` shards the part of `tp` lies in."""
    return range(tp.rank * count // tp.size, -(-(tp.rank + 1) * count // tp.size))


def _part(joined: Local | None, count: int, some: range, tp: Axis) -> Local | None:
    """The part of `tp` out of those `some` of `count` shards that it lies in; None if it cannot be cut so."""
    if joined is None or tp.split_dim >= len(joined.header.shape):
        return None
    shard = joined.header.shape[tp.split_dim] // len(some)
    total = shard * count
    if total % tp.size:
        return None
    extent = total // tp.size
    return take(joined, tp.split_dim, tp.rank * extent - some.start * shard, extent)


def _is_cut_so(header: Header, tp: Axis, of_any_rank: bool = False) -> bool:
    return any(
        (axis.kind, axis.size, axis.split_dim) == (tp.kind, tp.size, tp.split_dim)
        and (of_any_rank or axis.rank == tp.rank)
        for axis in header.axes
    )


def _header_of_shard(header: Header, axes: Axes, tp: Axis) -> Header:
    shape, dim = header.shape, tp.split_dim
    total = (*shape[:dim], shape[dim] * tp.size, *shape[dim + 1 :])
    shards = tuple(axis.shard(shape[dim] if axis.split_dim >= 0 else 0) for axis in axes)
    return Header(header.dtype, shape, total, shards)
