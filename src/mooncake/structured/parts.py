"""What callers say beside the data: how it is to be copied, which rows they want, and memory of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

PutMode = Literal["auto", "batch", "parallel"]
CopyMode = Literal["auto", "copy", "zero_copy"]


@dataclass(frozen=True)
class BundleTransferPolicy:
    """`copy_mode`: "zero_copy" accepts tensors only as tensor_object_buffer, which is stored from where it lies, and no
    fields that must be encoded; the others accept all.

    `max_inflight_put` and `put_mode` are checked, and change nothing: all that a put stores crosses in one batch.
    """

    max_inflight_put: int = 1
    put_mode: PutMode = "auto"
    copy_mode: CopyMode = "auto"

    def __post_init__(self) -> None:
        if self.max_inflight_put < 1:
            raise ValueError(f"max_inflight_put must be positive, not {self.max_inflight_put}")
        if self.put_mode not in ("auto", "batch", "parallel"):
            raise ValueError(f"put_mode {self.put_mode!r} is unknown: expected auto, batch or parallel")
        if self.copy_mode not in ("auto", "copy", "zero_copy"):
            raise ValueError(f"copy_mode {self.copy_mode!r} is unknown: expected auto, copy or zero_copy")


@dataclass(frozen=True)
class StructuredMemberSlice:
    """Rows `start` to `end` (without it), every `step`th; `axis` must be 0 when it is used."""

    axis: int
    start: int | None
    end: int | None
    step: int = 1

    def numbers(self, count: int) -> npt.NDArray[np.int64]:
        """Which of `count` rows these are.  Raises ValueError for another axis, or a step that is not positive."""
        if self.axis != 0:
            raise ValueError(f"rows can be chosen along axis 0 only (axis=0), not along {self.axis}")
        if self.step < 1:
            raise ValueError(f"step must be positive, not {self.step}")
        return np.arange(count, dtype=np.int64)[self.start : self.end : self.step]


Rows = slice | StructuredMemberSlice | Sequence[int]


@dataclass(frozen=True)
class TensorObjectBuffer:
    """Memory that holds a tensor as the store keeps it (header of 304 bytes and data), or has room for one."""

    ptr: int
    size: int
    owner: Any
    batch_size: int | None


@dataclass(frozen=True)
class RawDestination:
    """Room for the bytes of one field."""

    ptr: int
    size: int
    owner: Any
    pre_registered: bool


def tensor_object_buffer(ptr: int, size: int, owner: Any = None, batch_size: int | None = None) -> TensorObjectBuffer:
    """A tensor object at an address.  `owner` must keep the memory; `batch_size`: rows."""
    return TensorObjectBuffer(ptr, size, owner, batch_size)


def raw_destination(ptr: int, size: int, owner: Any = None, *, pre_registered: bool = False) -> RawDestination:
    """Room for `size` bytes at an address, such as a BufferPool's lease.  `owner` must keep the memory."""
    return RawDestination(ptr, size, owner, pre_registered)


def chosen(rows: Rows | None, count: int) -> npt.NDArray[np.int64] | None:
    """The numbers of the rows, of `count`; None means all.  Raises IndexError for one that is not there, TypeError for
    what names no rows."""
    if rows is None:
        return None
    everything: npt.NDArray[np.int64] = np.arange(count, dtype=np.int64)
    if isinstance(rows, StructuredMemberSlice):
        return rows.numbers(count)
    if isinstance(rows, slice):
        part: npt.NDArray[np.int64] = everything[rows]
        return part
    wanted: npt.NDArray[Any] = np.asarray(rows)
    if wanted.size == 0:
        return everything[:0]
    if wanted.ndim != 1 or not np.issubdtype(wanted.dtype, np.integer):
        raise TypeError(f"rows must be a slice or a sequence of row numbers, not {type(rows).__name__}")
    outside = wanted[(wanted < -count) | (wanted >= count)]
    if outside.size:
        raise IndexError(f"row {outside[0]} is not one of the {count} rows of the batch")
    picked: npt.NDArray[np.int64] = everything[wanted]
    return picked
