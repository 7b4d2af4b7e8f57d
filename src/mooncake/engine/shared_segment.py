"""SharedSegment: host memory that the ranks of one host share (spec: drop-in behaviour 2).

The owner makes a memfd, the others map it through the owner's /proc entry: nothing has a name in a file system, so
nothing is left behind whoever dies, and when.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from mooncake.transfer.cma import start_of
from mooncake.transfer.host import pid_namespace

_SEALS = 0x0002 | 0x0004  # F_SEAL_SHRINK | F_SEAL_GROW
_ADD_SEALS = 1033


class _Blob(msgspec.Struct, array_like=True):
    """What a rank tells the others.  The last five are the owner's: where its memory is to be found."""

    name: str
    size: int
    world_size: int
    rank: int
    owner: int
    namespace: str = ""
    pid: int = 0
    start: int = 0
    descriptor: int = -1
    inode: int = 0


class SharedSegment:
    """Made by `create`; every rank gathers all ranks' blobs, in the order of ranks, and hands them to `complete`."""

    def __init__(self, blob: _Blob) -> None:
        self._blob = blob
        self._descriptor = -1
        self._mapping: mmap.mmap | None = None
        self._address = 0
        self._complete = False

    @staticmethod
    def supported(mmap: bool = True, host_register: bool = False) -> bool:
        """Whether `create` can do that here: host memory, not registered with a device."""
        return mmap and not host_register

    @staticmethod
    def create(
        name: str,
        size: int,
        world_size: int,
        rank_id: int,
        owner_rank: int = 0,
        device_id: int = 0,
        mmap: bool = True,
        host_register: bool = False,
    ) -> "tuple[SharedSegment, bytes]":
        """This rank's end of a segment of `size` bytes, and the blob for the others.  Raises RuntimeError."""
        if not SharedSegment.supported(mmap, host_register):
            _fail(name, "device memory and host_register are not supported by this version; use mmap=True")
        if size <= 0 or not 0 <= rank_id < world_size or not 0 <= owner_rank < world_size:
            _fail(name, f"{size} bytes for rank {rank_id} and owner {owner_rank} of {world_size} ranks cannot be")
        blob = _Blob(name, size, world_size, rank_id, owner_rank)
        made = SharedSegment(blob)
        if rank_id == owner_rank:
            try:
                made._allocate()
            except OSError as error:
                _fail(name, f"{size} bytes cannot be had ({error.strerror})")
        return made, msgspec.msgpack.encode(blob)

    def complete(self, blobs: Sequence[bytes | str]) -> None:
        """Map the owner's memory.  Raises RuntimeError if the blobs are not those of this segment's ranks, or the owner
        is not a process of this host that is alive."""
        mine = self._blob
        ranks = [_decode(mine.name, blob) for blob in blobs]
        if [blob.rank for blob in ranks] != list(range(mine.world_size)):
            _fail(mine.name, f"expected the blobs of ranks 0 to {mine.world_size - 1}, in that order")
        for blob in ranks:
            if _what(blob) != _what(mine):
                _fail(mine.name, f"rank {blob.rank} has created another segment: {blob.name!r} of {blob.size} bytes")
        if self._mapping is None:
            self._attach(ranks[mine.owner])
        self._complete = True

    def ready(self) -> bool:
        """Whether `complete` has succeeded."""
        return self._complete

    def base_addr(self) -> int:
        """Where the memory is in this process; 0 before it is mapped.  It stays as long as this object does."""
        return self._address

    def device_addr(self) -> int:
        """0: it is not registered with a device."""
        return 0

    def size(self) -> int:
        return self._blob.size

    # -- inside

    def _allocate(self) -> None:
        blob = self._blob
        self._descriptor = os.memfd_create(f"mooncake-{blob.name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, blob.size)
        _seal(self._descriptor)
        self._map(self._descriptor)
        blob.namespace, blob.pid, blob.start = pid_namespace(), os.getpid(), start_of(os.getpid())
        blob.descriptor, blob.inode = self._descriptor, os.fstat(self._descriptor).st_ino

    def _attach(self, owner: _Blob) -> None:
        name = self._blob.name
        if owner.namespace != pid_namespace():
            _fail(name, "its owner is on another host or in another pid namespace")
        try:
            if start_of(owner.pid) != owner.start:
                raise ProcessLookupError
            descriptor = os.open(f"/proc/{owner.pid}/fd/{owner.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            _fail(name, f"its owner, process {owner.pid}, has ended or let it go")
        except OSError as error:
            _fail(name, f"the memory of its owner, process {owner.pid}, cannot be opened ({error.strerror})")
        try:
            found = os.fstat(descriptor)
            if (found.st_ino, found.st_size) != (owner.inode, owner.size):
                _fail(name, f"its owner, process {owner.pid}, has let it go")
            self._map(descriptor)
        finally:
            os.close(descriptor)

    def _map(self, descriptor: int) -> None:
        self._mapping = mmap.mmap(descriptor, self._blob.size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def __del__(self) -> None:
        if self._descriptor >= 0 and not sys.is_finalizing():
            os.close(self._descriptor)


def _what(blob: _Blob) -> tuple[object, ...]:
    """What all ranks must have created alike."""
    return blob.name, blob.size, blob.world_size, blob.owner


def _seal(descriptor: int) -> None:
    import fcntl

    fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)


def _decode(name: str, blob: bytes | str) -> _Blob:
    raw = blob.encode("latin-1") if isinstance(blob, str) else bytes(blob)
    try:
        return msgspec.msgpack.decode(raw, type=_Blob)
    except (msgspec.MsgspecError, UnicodeError):
        _fail(name, "a blob is not one that create has returned")


def _fail(name: str, reason: str) -> NoReturn:
    raise RuntimeError(f"shared segment {name!r}: {reason}")
