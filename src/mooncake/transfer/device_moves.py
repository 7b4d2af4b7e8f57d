"""Transfers of the same host with device memory at one end or both.

The peer's device memory is mapped here (cuda.peers) and copied by this process's own GPU; its host memory is reached
by cma, by way of the staging buffer if our end is device memory.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from mooncake.errors import TransferError, TransferTimedOut
from mooncake.rpc.engine_messages import Exported
from mooncake.transfer.cma import CmaLink
from mooncake.transfer.cuda import driver
from mooncake.transfer.cuda.device import NO_GPU, kinds_of, only_kind_of
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

    def move(self, write: bool, local: Pieces, remote: Pieces, is_host: bool, deadline: float) -> bool:
        """Copy `local` to `remote` or back; False if there is no device memory among them (nothing is copied then).
        `is_host`: ours are known to be host memory.  Raises TransferError, NotReachedError (nothing is copied)."""
        with self._link.use(remote) as regions:
            far = regions.kinds_of(remote)
            asks = driver.is_loaded() and not is_host
            only = only_kind_of(local) if asks else NO_GPU
            near = kinds_of(local) if only is None else np.full(len(far), only, np.int64)
            if not far.any() and (near == NO_GPU).all():
                return False
            runs = list(_runs(local, remote, near, far))
            imports = [None if kind == HOST else self._import(kind, ordinal) for _, _, ordinal, kind in runs]
            for (ours, theirs, ordinal, _), imported in zip(runs, imports, strict=True):
                if time.monotonic() > deadline:
                    raise TransferTimedOut("the transfer did not end within its time limit")
                if imported is not None:
                    there = Pieces(theirs.addresses + imported.shift(), theirs.lengths)
                    self._by_gpu(write, imported, ours, there, ordinal, is_host, deadline)
                elif ordinal == NO_GPU:
                    self._link.move(write, ours, theirs, deadline)
                else:
                    self._by_cma(write, ours, theirs, deadline)
        return True

    def close(self) -> None:
        """Let go of what is mapped; nothing is under way."""
        with self._lock:
            imports, self._imports = list(self._imports.values()), {}
        for imported in imports:
            imported.close()

    # -- inside

    def _by_gpu(
        self, write: bool, imported: Import, near: Pieces, there: Pieces, ordinal: int, is_host: bool, deadline: float
    ) -> None:
        """Device memory that is mapped here, and memory of ours: of GPU `ordinal`, or host memory."""
        if ordinal != NO_GPU:
            imported.device.copy(*((near, there) if write else (there, near)))
        elif not is_host:
            self._checked(write, near, there, deadline)
        elif write:
            imported.device.read_in(near, there)
        else:
            imported.device.write_out(there, near)

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
