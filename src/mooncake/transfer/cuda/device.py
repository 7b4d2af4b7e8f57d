"""One GPU: moving bytes between pieces of its memory and host memory, or within device memory."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from mooncake.errors import TransferError
from mooncake.transfer.cuda import driver
from mooncake.transfer.cuda.crossing import FEW, Inward, Outward
from mooncake.transfer.cuda.driver import Context, CudaError, Range, call
from mooncake.transfer.cuda.lanes import TABLE, Lanes
from mooncake.transfer.cuda.plan import descriptors, pair
from mooncake.transfer.pieces import Pieces

MOST_LANES = 4  # sets of lanes of a device: how many calls run at once
NO_GPU = -1  # host memory, in place of a GPU's number
_FEW_KINDS = 128  # pieces: quicker one by one


class _Held(threading.local):
    """How many lanes this thread has."""

    count = 0


class Device:
    """Thread-safe; every method returns when all bytes are there.  Raises TransferError."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.context = Context(ordinal)
        with self.context.current():
            text = files(__package__).joinpath("copy.ptx").read_bytes()
            self._kernels = driver.load_kernels(text, ["copy_wide", "copy_bytes", "blocks_wide", "blocks_bytes"])
        self._free: list[Lanes] = []
        self._made = 0
        self._lock = threading.Condition()
        self._held = _Held()
        with self._lanes():
            pass  # the first call need not wait for them

    @contextmanager
    def crossing(self, kind: type[Outward] | type[Inward]) -> Iterator[Outward | Inward]:
        """To copy to or from host memory in several steps; at the end all bytes are there.  The thread may do other
        things between the steps."""
        with self._lanes() as lanes:
            crossing = kind(self.context, lanes)
            yield crossing
            crossing.finish()

    def write_out(self, pieces: Pieces, host: Pieces) -> None:
        """Pieces of device memory → `host`, valid host memory of the same total."""
        with self.crossing(Outward) as crossing:
            crossing.add(pieces, host)

    def read_in(self, host: Pieces, pieces: Pieces) -> None:
        """The other way."""
        with self.crossing(Inward) as crossing:
            crossing.add(pieces, host)

    def copy(self, source: Pieces, target: Pieces) -> None:
        """Within device memory of any GPUs that this one can reach."""
        sources, targets, lengths = pair(source, target)
        with self._lanes() as lanes, self.context.current():
            if len(lengths) <= FEW:
                for to, at, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
                    call("cuMemcpyDtoDAsync_v2", to, at, length, lanes.kernels)
                lanes.wait(lanes.kernels)
                return
            for first in range(0, len(lengths), TABLE):
                end = first + TABLE
                table, wide = descriptors(sources[first:end], targets[first:end], lengths[first:end])
                lanes.load(table, 0)
                lanes.launch(0, len(table), wide, int(lengths[first:end].max()))
                lanes.wait(lanes.kernels)

    # -- inside

    @contextmanager
    def _lanes(self) -> Iterator[Lanes]:
        """Lanes for one call."""
        with self.context.current():
            lanes = self._take()
        self._held.count += 1
        try:
            yield lanes
        except BaseException:
            with self.context.current():
                for stream in (lanes.kernels, lanes.copies):  # nothing may still be under way
                    with suppress(CudaError):
                        lanes.wait(stream)
            raise
        finally:
            self._held.count -= 1
            with self._lock:
                self._free.append(lanes)
                self._lock.notify()

    def _take(self) -> Lanes:
        with self._lock:
            while True:
                if self._free:
                    return self._free.pop()
                if self._made < MOST_LANES or self._held.count:  # who holds some must not wait for more
                    try:
                        lanes = Lanes(self._kernels, with_memory=True)
                    except CudaError:
                        if not self._made:  # no device memory is left at all: pieces go one by one
                            lanes = Lanes(self._kernels, with_memory=False)
                            self._made = MOST_LANES
                            return lanes
                        if self._held.count:
                            return Lanes(self._kernels, with_memory=False)
                    else:
                        self._made += 1
                        return lanes
                self._lock.wait()


@cache
def _device(ordinal: int) -> Device:
    return Device(ordinal)


_making = threading.Lock()


def device(ordinal: int) -> Device:
    """The one Device of a GPU of this process.  Raises CudaError."""
    with _making:
        return _device(ordinal)


os.register_at_fork(after_in_child=_device.cache_clear)


def only_kind_of(pieces: Pieces) -> int | None:
    """The GPU whose memory they all are, if they lie in one allocation."""
    allocation = driver.range_of(int(pieces.addresses[0]))
    if allocation is None or pieces.addresses.min() < allocation.base:
        return None
    return allocation.device if (pieces.addresses + pieces.lengths).max() <= allocation.end else None


def kinds_of(pieces: Pieces) -> npt.NDArray[np.int64]:
    """For each piece the GPU whose memory it is, NO_GPU if it is none's.  Raises TransferError for one that runs over
    the end of its allocation: a kernel that touched what is not there would end the whole process's CUDA."""
    if len(pieces.lengths) <= _FEW_KINDS:
        return np.array(list(_kinds_one_by_one(pieces)), np.int64)
    first, last = pieces.addresses, pieces.addresses + pieces.lengths
    kinds = np.full(len(first), NO_GPU, np.int64)
    left = np.ones(len(first), bool)
    while left.any():
        at = int(first[int(np.argmax(left))])
        allocation = driver.range_of(at)
        if allocation is None:
            left &= first != at
            continue
        inside = left & (first >= allocation.base) & (first < allocation.end)
        _check_end(allocation, int(last[inside].max()))
        kinds[inside] = allocation.device
        left &= ~inside
    return kinds


def _kinds_one_by_one(pieces: Pieces) -> Iterator[int]:
    allocation: Range | None = None
    for first, length in zip(pieces.addresses.tolist(), pieces.lengths.tolist(), strict=True):
        if allocation is None or not allocation.base <= first < allocation.end:
            allocation = driver.range_of(first)
        if allocation is None:
            yield NO_GPU
            continue
        _check_end(allocation, first + length)
        yield allocation.device


def _check_end(allocation: Range, end: int) -> None:
    if end > allocation.end and driver.run_of(allocation, end).end < end:
        raise TransferError(f"a piece in the device allocation at {allocation.base:#x} runs over its end")
