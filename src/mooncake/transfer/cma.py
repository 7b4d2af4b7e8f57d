"""Another process's registered memory on the same host, by process_vm_readv and process_vm_writev.

One copy, made by the kernel while the interpreter lock is free; the other process takes no part in it.  Bad addresses
are errors.  Many systems forbid it (Yama, seccomp, other users, pid namespaces), so opening a link makes real transfers
first.
"""

import ctypes
import errno
import os
import secrets
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np

from mooncake.errors import TransferError, TransferTimedOut
from mooncake.rpc.engine_messages import EngineOpened
from mooncake.transfer.helper import Helper
from mooncake.transfer.pieces import Pieces, pieces_of
from mooncake.transfer.region_table import EMPTY, RegionTable, Snapshot, slot_offsets
from mooncake.transfer.table import fence

MAX_PIECES = 1024  # of one system call (IOV_MAX)
SHARED_FROM = 1024  # pieces: so many are copied by two threads, if the second one is free
STEP = 128 << 20  # bytes of one system call: how often epoch, peer and clock are looked at
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = -1

_NOT_ENTERED = -1
_helper = Helper()
_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("process_vm_readv", "process_vm_writev"):
    getattr(_libc, _name).restype = ctypes.c_ssize_t
    getattr(_libc, _name).argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


class CmaRefusedError(Exception):
    """This host does not permit it, or the peer is on another one."""


class NotBegunError(TransferError):
    """The link was closed, or the other process has taken our slot back, before anything was copied: open it again."""


def allow() -> None:
    """Let processes of the same user copy from and to this one where Yama would forbid it."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)


def forget_helper() -> None:
    """In a forked child, which does not have the thread."""
    global _helper
    _helper = Helper()


def start_of(pid: int) -> int:
    """When a process started (clock ticks since boot); with the pid it names the process.  Raises OSError."""
    with open(f"/proc/{pid}/stat") as f:
        return int(f.read().rpartition(")")[2].split()[19])


def has_ended(pidfd: int) -> bool:
    """Whether all threads of a process have ended, so that none of its copies is under way."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class Closable(Protocol):
    def close(self) -> None: ...


Companion = TypeVar("Companion", bound=Closable)


class CmaLink:
    """The way into one process.  Thread-safe."""

    def __init__(self, opened: EngineOpened) -> None:
        """Raises CmaRefusedError if the kernel forbids it or it is not the process that it should be."""
        self.pid = opened.pid
        self.companion: Any = None  # see `keep`
        self._slot, self._token = opened.slot, opened.token
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self._regions = EMPTY
        try:
            self.pidfd = os.pidfd_open(opened.pid)
        except OSError as error:
            raise CmaRefusedError(f"process {opened.pid} is not seen here ({error.strerror})") from None
        try:
            self._table = RegionTable.of_process(opened.pid, opened.table_fd)
        except (OSError, ValueError) as error:
            os.close(self.pidfd)
            raise CmaRefusedError(f"its region table cannot be mapped: {error}") from None
        try:
            if start_of(opened.pid) != opened.start or not self._table.holds(self._slot, self._token):
                raise CmaRefusedError(f"process {opened.pid} is another one than it was")
            self._probe(opened.table_address)
        except (OSError, CmaRefusedError) as error:
            self.close()
            raise CmaRefusedError(str(error)) from None

    def move(self, write: bool, local: Pieces, remote: Pieces, deadline: float) -> None:
        """Copy `local` to `remote` (or back), piece by piece of equal length.  Raises TransferError."""
        call = _libc.process_vm_writev if write else _libc.process_vm_readv
        near, far = _joined(local, remote)
        epoch = self._enter(remote)
        if len(near.lengths) < SHARED_FROM:
            self._copy(call, near, far, remote, deadline, epoch)
            return
        total = near.total
        half = total // 2
        job = _helper.begin(
            lambda: self._copy(
                call, near.part(half, total - half), far.part(half, total - half), remote, deadline, _NOT_ENTERED
            )
        )
        if job is None:
            self._copy(call, near, far, remote, deadline, epoch)
            return
        try:
            self._copy(call, near.part(0, half), far.part(0, half), remote, deadline, epoch)
        finally:
            job.finish()

    def _copy(self, call: Any, near: Pieces, far: Pieces, remote: Pieces, deadline: float, epoch: int) -> None:
        """Copy `near` to or from `far`, which lie in `remote`'s ranges; counted in under `epoch`, which it leaves."""
        try:
            if epoch == _NOT_ENTERED:
                epoch = self._enter_again(remote)
            ends = np.cumsum(near.lengths)
            near_vector, far_vector = _vector(near), _vector(far)
            count, total, done = len(ends), int(ends[-1]), 0
            while done < total:
                if self._table.epoch != epoch:
                    self._leave(epoch)
                    epoch = _NOT_ENTERED
                    epoch = self._enter_again(remote)
                if done:
                    self._look(deadline)
                first, begun, stop, over = 0, 0, count, 0
                if done or count > MAX_PIECES or total > STEP:
                    first = int(np.searchsorted(ends, done, side="right"))
                    begun = done - int(ends[first] - near.lengths[first])
                    stop = min(first + MAX_PIECES, int(np.searchsorted(ends, done + STEP)) + 1, count)
                    over = max(0, int(ends[stop - 1]) - done - STEP)
                    for vector, pieces in ((near_vector, near), (far_vector, far)):
                        vector[first] = pieces.addresses[first] + begun, pieces.lengths[first] - begun
                        vector[stop - 1, 1] -= over
                at = first * 16
                moved = call(
                    self.pid,
                    near_vector.ctypes.data + at,
                    stop - first,
                    far_vector.ctypes.data + at,
                    stop - first,
                    0,
                )
                if moved <= 0:
                    raise _failure(self.pid, ctypes.get_errno())
                if over:
                    near_vector[stop - 1, 1] += over
                    far_vector[stop - 1, 1] += over
                done += moved
            self._look(deadline)
        finally:
            if epoch != _NOT_ENTERED:
                self._leave(epoch)

    @contextmanager
    def use(self, remote: Pieces) -> Iterator[Snapshot]:
        """The process's regions; meanwhile these ranges stay registered.  Raises as `move`."""
        epoch = self._enter(remote)
        try:
            yield self._regions
        finally:
            self._leave(epoch)

    def alive(self) -> bool:
        """Whether the process lives and our slot is still ours."""
        with self._lock:
            return not (self._closed or has_ended(self.pidfd)) and self._table.holds(self._slot, self._token)

    @property
    def has_device_memory(self) -> bool:
        """Whether the process has registered any."""
        if self._table.version != self._regions.version:
            self._regions = self._table.read()
        return bool(self._regions.kinds.any())

    def keep(self, companion: Companion) -> Companion:
        """What else there is for reaching this process, from now on; it is closed with the link."""
        self.companion = companion
        return companion

    def close(self) -> None:
        """Let go; copies under way end first."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._users == 0
        if idle:
            self._release()

    # -- inside

    def _probe(self, table_address: int) -> None:
        """Read our token through the process's memory; only where it is, write a word and see it in the table."""
        word = np.zeros(1, np.uint64)
        here, token, echo = int(word.ctypes.data), *(table_address + at for at in slot_offsets(self._slot))

        def transfer(call: Any, there: int) -> None:
            near, far = _vector(pieces_of([here], [8])), _vector(pieces_of([there], [8]))
            if call(self.pid, near.ctypes.data, 1, far.ctypes.data, 1, 0) != 8:
                raise OSError(ctypes.get_errno(), f"{call.__name__}: {os.strerror(ctypes.get_errno())}")

        transfer(_libc.process_vm_readv, token)
        if int(word[0]) == self._token:
            word[0] = secrets.randbits(63)
            transfer(_libc.process_vm_writev, echo)
            if self._table.echo(self._slot) == int(word[0]):
                return
        raise CmaRefusedError(f"process {self.pid} is another one than the region table's owner")

    def _enter(self, remote: Pieces) -> int:
        """Count a copy in; its epoch.  Raises TransferError if a range is not registered."""
        with self._lock:
            if self._closed:
                raise NotBegunError(f"the link to process {self.pid} is closed")
            while True:
                epoch = self._table.epoch
                self._table.count(self._slot, epoch, 1)
                fence()
                mine = self._table.holds(self._slot, self._token)
                if mine and self._table.epoch == epoch:
                    self._users += 1
                    break
                if mine:
                    self._table.count(self._slot, epoch, -1)
                    continue
                raise NotBegunError(f"process {self.pid} has taken its slot back")
        try:
            regions = self._regions
            if self._table.version != regions.version:
                regions = self._regions = self._table.read()
            if not regions.covers(remote):
                raise TransferError(f"a range is not inside one registered region of process {self.pid}")
        except BaseException:
            self._leave(epoch)
            raise
        return epoch

    def _enter_again(self, remote: Pieces) -> int:
        try:
            return self._enter(remote)
        except NotBegunError as error:
            raise TransferError(f"{error}, in the middle of a copy") from None

    def _leave(self, epoch: int) -> None:
        with self._lock:
            if self._table.holds(self._slot, self._token):
                self._table.count(self._slot, epoch, -1)
            self._users -= 1
            last = self._closed and self._users == 0
        if last:
            self._release()

    def _release(self) -> None:
        if self.companion is not None:
            self.companion.close()
        if self._table.holds(self._slot, self._token):
            self._table.revoke(self._slot)
        self._table.close()
        os.close(self.pidfd)

    def _look(self, deadline: float) -> None:
        if has_ended(self.pidfd):
            raise TransferError(f"process {self.pid} has ended")
        if time.monotonic() > deadline:
            raise TransferTimedOut("the transfer did not end within its time limit")


def _joined(local: Pieces, remote: Pieces) -> tuple[Pieces, Pieces]:
    """The same ranges with those that adjoin on both sides made one."""
    if len(local.lengths) == 1:
        return local, remote
    lengths = local.lengths
    breaks = (local.addresses[1:] != local.addresses[:-1] + lengths[:-1]) | (
        remote.addresses[1:] != remote.addresses[:-1] + lengths[:-1]
    )
    if breaks.all():
        return local, remote
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.add.reduceat(lengths, starts)
    return Pieces(local.addresses[starts], lengths), Pieces(remote.addresses[starts], lengths)


def _vector(pieces: Pieces) -> Any:
    """As an array of struct iovec."""
    vector = np.empty((len(pieces.lengths), 2), np.int64)
    vector[:, 0], vector[:, 1] = pieces
    return vector


def _failure(pid: int, reason: int) -> TransferError:
    if reason == errno.ESRCH:
        return TransferError(f"process {pid} has ended")
    if reason == errno.EFAULT:
        return TransferError("memory at one of the two ends is not mapped, or not with the needed rights")
    return TransferError(f"the kernel could not copy from or to process {pid}: {os.strerror(reason)}")
