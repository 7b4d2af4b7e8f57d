"""Transfers of the same host with device memory at one end or both.

The peer's device memory is mapped here (cuda.peers) and copied by this process's own GPU; its host memory is reached
by cma, by way of the staging buffer if our end is device memory.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np

from mooncake.errors import TransferError, TransferTimedOut
from mooncake.rpc.messages import Exported
from mooncake.transfer.cma import CmaLink
from mooncake.transfer.cuda import driver
from mooncake.transfer.cuda.device import NO_GPU, kinds_of
from mooncake.transfer.cuda.peers import HOST, NOT_EXPORTED, Import, reaching_device
from mooncake.transfer.pieces import Int64Array, Pieces, pieces_of
from mooncake.transfer.staging import STAGING, staging

Ask = Callable[[list[int]], list[Exported]]
"""Asks the peer's process what is behind numbers.  Raises TransferError."""


class NotReachedError(Exception):
    """This way does not lead there: take another one."""


class DeviceMoves:
    """To and from one process, over its link.  Thread-safe."""

    def __init__(self, link: CmaLink, ask: Ask) -> None:
        self._link = link
        self._ask = ask
        self._lock = threading.Lock()
        self._imports: dict[tuple[int, int], Import] = {}  # by the region's number and the GPU that reaches it
        self._unreachable: set[int] = set()

    def concern(self, local: Pieces, remote: Pieces, is_host: bool) -> tuple[Int64Array, Int64Array] | None:
        """The kinds of both ends' pieces (ours: GPU, or NO_GPU), if device memory is among them.  `is_host`: ours
        are known to be host memory.  Raises TransferError."""
        far = self._link.kinds_of(remote)
        asks = driver.is_loaded() and not is_host
        near = kinds_of(local) if asks else np.full(len(far), NO_GPU, np.int64)
        return (near, far) if far.any() or (near != NO_GPU).any() else None

    def move(
        self,
        write: bool,
        local: Pieces,
        remote: Pieces,
        kinds: tuple[Int64Array, Int64Array],
        is_host: bool,
        deadline: float,
    ) -> None:
        """Copy `local` to `remote` or back.  Raises TransferError, NotReachedError (nothing is copied then)."""
        runs = list(_runs(local, remote, *kinds))
        with self._link.use(remote) if kinds[1].any() else nullcontext():
            imports = [None if kind == HOST else self._import(kind, ordinal) for _, _, ordinal, kind in runs]
            for (near, far, ordinal, _), imported in zip(runs, imports, strict=True):
                if time.monotonic() > deadline:
                    raise TransferTimedOut("the transfer did not end within its time limit")
                if imported is None:
                    if ordinal == NO_GPU:
                        self._link.move(write, near, far, deadline)
                    else:
                        self._by_cma(write, near, far, deadline)
                    continue
                there = Pieces(far.addresses + imported.shift(), far.lengths)
                if ordinal != NO_GPU:
                    imported.device.copy(*((near, there) if write else (there, near)))
                elif is_host:
                    (imported.device.read_in(near, there) if write else imported.device.write_out(there, near))
                else:
                    self._checked(write, near, there, deadline)

    def close(self) -> None:
        """Let go of what is mapped; nothing is under way."""
        with self._lock:
            imports, self._imports = list(self._imports.values()), {}
        for imported in imports:
            imported.close()

    # -- inside

    def _by_cma(self, write: bool, near: Pieces, far: Pieces, deadline: float) -> None:
        """Our device memory and the peer's host memory."""
        buffer = staging()
        for ours, theirs in _steps(near, far):
            room = pieces_of([buffer.address], [ours.total])
            if write:
                buffer.fill(ours, False)
            through = _spread(room, theirs)
            self._link.move(write, through, theirs, deadline)
            if not write:
                buffer.empty(ours, False)

    def _checked(self, write: bool, near: Pieces, there: Pieces, deadline: float) -> None:
        """Host memory of ours that may be none, and mapped device memory."""
        buffer = staging()
        for ours, theirs in _steps(near, there):
            if write:
                buffer.fill(ours, False)
                buffer.empty(theirs, False)
            else:
                buffer.fill(theirs, False)
                buffer.empty(ours, False)
            if time.monotonic() > deadline:
                raise TransferTimedOut("the transfer did not end within its time limit")

    def _import(self, number: int, near: int) -> Import:
        if number == NOT_EXPORTED or number in self._unreachable or not driver.is_loaded():
            raise NotReachedError
        with self._lock:
            known = self._imports.get((number, near))
            if known is not None:
                return known
            answer = self._ask([number])
            if not answer:
                raise TransferError(f"process {self._link.pid} has no device memory of number {number}")
            here = self._link.pid == os.getpid()
            try:
                made = Import(answer[0], here, reaching_device(answer[0], near))
            except TransferError as error:
                self._unreachable.add(number)
                raise NotReachedError(str(error)) from None
            self._imports[number, near] = made
            return made


def _runs(
    local: Pieces, remote: Pieces, near: Int64Array, far: Int64Array
) -> Iterator[tuple[Pieces, Pieces, int, int]]:
    """Pieces of one pair of kinds: (ours, theirs, our kind, their kind)."""
    breaks = (np.flatnonzero(np.diff(near) | np.diff(far)) + 1).tolist()
    for first, end in zip([0, *breaks], [*breaks, len(near)], strict=True):
        part = slice(first, end)
        yield (
            Pieces(local.addresses[part], local.lengths[part]),
            Pieces(remote.addresses[part], remote.lengths[part]),
            int(near[first]),
            int(far[first]),
        )


def _steps(near: Pieces, far: Pieces) -> Iterator[tuple[Pieces, Pieces]]:
    """Both ends in steps that the staging buffer holds."""
    total = near.total
    for start in range(0, total, STAGING):
        length = min(STAGING, total - start)
        yield near.part(start, length), far.part(start, length)


def _spread(room: Pieces, pieces: Pieces) -> Pieces:
    """One range as pieces as long as those."""
    ends = np.cumsum(pieces.lengths)
    return Pieces(room.addresses[0] + ends - pieces.lengths, pieces.lengths)
