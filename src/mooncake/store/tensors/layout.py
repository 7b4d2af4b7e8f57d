"""How a tensor is divided among workers, and the keys and manifests that its shards go by.

    one tensor axis                       <key>_tp_<rank>
    several axes, or another one          <key>__<kind>_<rank>of<size>[_sd<split>][_eid<expert>][_sid<stage>]...
    a part that one of several writers    <key>__writer_<rank>of<size>_sd<split>

A manifest says how the shards of a key were cut: <key>__parallelism_manifest, <key>__writer_manifest.
"""

import struct
from typing import Any, NamedTuple

from mooncake.store.tensors.header import DTYPES, MOST_AXES, MOST_DIMENSIONS, Header, ShardAxis

KINDS = ("dp", "tp", "ep", "pp")
TP = KINDS.index("tp")

_MANIFEST = struct.Struct("<IHH4iQ8q")
_MAGIC = 0x574D414E


class ParallelAxis:
    """One way in which work is divided: kind "dp", "tp", "ep" or "pp", this worker's rank of size.  A "tp" axis says
    along which dimension tensors are cut (`split_dim`)."""

    def __init__(self) -> None:
        self.kind = ""
        self.rank = 0
        self.size = 1
        self.split_dim: int | None = None
        self.expert_id: int | None = None
        self.stage_id: int | None = None


class TensorParallelism:
    """All axes of a worker."""

    def __init__(self) -> None:
        self.axes: list[ParallelAxis] = []


class ReadTarget:
    """What to read: "as_stored", the "shard" of the worker that `parallelism` describes, or the "full" tensor."""

    def __init__(self) -> None:
        self._mode = "as_stored"
        self.parallelism: Any = None

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in ("as_stored", "shard", "full"):
            raise RuntimeError(f"Unsupported ReadTarget mode {mode!r}; expected as_stored, shard or full")
        self._mode = mode


class Axis(NamedTuple):
    """A checked ParallelAxis; `split_dim` -1: none."""

    kind: int
    rank: int
    size: int
    split_dim: int = -1
    label: int | None = None

    def key_part(self) -> str:
        text = f"__{KINDS[self.kind]}_{self.rank}of{self.size}"
        if self.split_dim >= 0:
            text += f"_sd{self.split_dim}"
        if self.label is not None:
            text += f"_{'eid' if KINDS[self.kind] == 'ep' else 'sid'}{self.label}"
        return text

    def shard(self, extent: int) -> ShardAxis:
        return ShardAxis(self.kind, self.rank, self.size, self.split_dim, self.label or 0, extent)


Axes = tuple[Axis, ...]


def axes_of(parallelism: Any) -> Axes:
    """Any object with `axes`, each with the attributes of ParallelAxis.  Raises ValueError for what cannot be."""
    given = getattr(parallelism, "axes", None)
    if not isinstance(given, list | tuple) or not 0 < len(given) <= MOST_AXES:
        raise ValueError(f"{parallelism!r} has no list of 1 to {MOST_AXES} axes")
    axes = tuple(_axis_of(axis) for axis in given)
    if len({axis.kind for axis in axes}) < len(axes):
        raise ValueError("two axes are of one kind")
    return axes


def _axis_of(given: Any) -> Axis:
    name = getattr(given, "kind", None)
    if name not in KINDS:
        raise ValueError(f"an axis of kind {name!r}; expected one of {', '.join(KINDS)}")
    rank, size = getattr(given, "rank", 0), getattr(given, "size", 1)
    split = getattr(given, "split_dim", None)
    label = getattr(given, "expert_id" if name == "ep" else "stage_id", None)
    if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size):
        raise ValueError(f"rank {rank!r} of {size!r} in a {name} axis")
    if (split is not None) != (name == "tp") or (split is not None and not 0 <= split < MOST_DIMENSIONS):
        raise ValueError(f"split_dim is {split!r} in a {name} axis; a tp axis needs one, the others have none")
    return Axis(KINDS.index(name), rank, size, -1 if split is None else split, label)


def writer_axis(partition: Any) -> Axis:
    """The part of a writer: any object with rank, size and split_dim.  Raises ValueError."""
    rank, size, split = (getattr(partition, name, None) for name in ("rank", "size", "split_dim"))
    if not all(isinstance(number, int) for number in (rank, size, split)):
        raise ValueError(f"{partition!r} lacks rank, size or split_dim")
    if not (0 <= rank < size and 0 <= split < MOST_DIMENSIONS):  # type: ignore[operator]  # they are numbers
        raise ValueError(f"a writer of rank {rank} of {size} along dimension {split}")
    return Axis(TP, int(rank or 0), int(size or 0), int(split or 0))


def tp_of(axes: Axes) -> Axis | None:
    return next((axis for axis in axes if axis.kind == TP), None)


def with_tp(axes: Axes, tp: Axis) -> Axes:
    """The same with another tensor axis."""
    return tuple(tp if axis.kind == TP else axis for axis in axes)


def tp_key(key: str, rank: int, size: int) -> str:
    return key if size <= 1 else f"{key}_tp_{rank}"


def shard_key(key: str, axes: Axes) -> str:
    if len(axes) == 1 and axes[0].kind == TP:
        return f"{key}_tp_{axes[0].rank}"
    return key + "".join(axis.key_part() for axis in sorted(axes))


def writer_key(key: str, axis: Axis) -> str:
    return f"{key}__writer_{axis.rank}of{axis.size}_sd{axis.split_dim}"


def layout_manifest_key(key: str) -> str:
    return key + "__parallelism_manifest"


def writer_manifest_key(key: str) -> str:
    return key + "__writer_manifest"


def pack_manifest(header: Header, axis: Axis) -> bytes:
    """How the tensor that `header` is of was cut."""
    shape = [*header.whole, *[-1] * (MOST_DIMENSIONS - len(header.whole))]
    return _MANIFEST.pack(
        _MAGIC, 1, _MANIFEST.size, header.dtype, len(header.whole), axis.split_dim, axis.size, 0, *shape
    )


def unpack_manifest(raw: bytes) -> Axis | None:
    """The cut that a manifest says, as rank 0's axis; None if it is none."""
    if len(raw) != _MANIFEST.size:
        return None
    magic, version, size, dtype, dimensions, split, count, *_ = _MANIFEST.unpack(raw)
    if (magic, version, size) != (_MAGIC, 1, _MANIFEST.size) or not 0 <= dtype < len(DTYPES):
        return None
    if not 0 <= split < dimensions <= MOST_DIMENSIONS or count < 1:
        return None
    return Axis(TP, 0, count, split)
