"""Which regions an engine has registered, in shared memory: processes of the same host that copy from and to them look
here, so that the engine's own interpreter is not asked.

    header          magic | version | epoch | number of regions in half 0 | in half 1
    slots           one for each process that copies: token | echo | copies under way of even epochs | of odd ones
    half 0, half 1  bases, ends, kinds of the regions, sorted by base; kind 0 is host memory, a positive one the number
                    of exported device memory (see cuda.peers), -1 device memory that can only be had from its process

The owner writes the half that is not in use, then moves `version` on; half `version % 2` counts.  So a reader never
waits, and what it copied is good if `version` is still the same afterwards.

Nothing is written to a region once `unregister` has returned.  A copier counts itself in under the current epoch, then
looks whether that still is the epoch and its ranges are registered; it looks again before every system call (at most
128 MiB).  The owner takes the regions out, moves the epoch on, and waits until nobody is counted under the old one.
Each side stores first, reads after.  Asking before each batch would need the owner's interpreter, and would not know
of copies under way.  A copier that is stopped inside a copy for longer than the owner waits loses its slot (the token
is cleared), and `unregister` says so.
"""

import ctypes
import mmap
import os
from typing import NamedTuple

import numpy as np

from mooncake.transfer.pieces import Int64Array, Pieces
from mooncake.transfer.table import fence

MAGIC = 0x4D4B5246
SLOTS = 1024
MAX_REGIONS = 1 << 17
_HEADER = 64  # bytes
_SLOT = 64
_HALF = MAX_REGIONS * 24
_REGIONS_AT = _HEADER + SLOTS * _SLOT
SIZE = -(-(_REGIONS_AT + 2 * _HALF) // mmap.PAGESIZE) * mmap.PAGESIZE
_VERSION, _EPOCH, _COUNT = 1, 2, 3  # words of the header
_TOKEN, _ECHO, _COPIES = 0, 1, 2  # words of a slot


class Snapshot(NamedTuple):
    """Regions [base, end), sorted by base."""

    version: int
    bases: Int64Array
    ends: Int64Array
    kinds: Int64Array

    def kinds_of(self, pieces: Pieces) -> Int64Array:
        """The kind of each piece's region; `pieces` are covered."""
        return self.kinds[np.searchsorted(self.bases, pieces.addresses, side="right") - 1]

    def covers(self, pieces: Pieces) -> bool:
        """Whether every piece lies inside one region."""
        if not len(self.bases):
            return False
        index = np.searchsorted(self.bases, pieces.addresses, side="right") - 1
        return bool((index >= 0).all() and (pieces.addresses + pieces.lengths <= self.ends[index]).all())


EMPTY = Snapshot(0, *(np.empty(0, np.int64) for _ in range(3)))


class RegionTable:
    """One mapped table; its owner and the copiers use the same class."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._mapping = mmap.mmap(fd, SIZE)
        self._words = memoryview(self._mapping).cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    @classmethod
    def create(cls) -> "RegionTable":
        fd = os.memfd_create("mooncake-regions", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, SIZE)
            table = cls(fd)
        except BaseException:
            os.close(fd)
            raise
        table._words[0] = MAGIC
        return table

    @classmethod
    def of_process(cls, pid: int, fd: int) -> "RegionTable":
        """That of another process, by its descriptor there.  Raises OSError or ValueError if it cannot be had."""
        mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(mine).st_size != SIZE:
                raise ValueError(f"descriptor {fd} of process {pid} is no region table")
            table = cls(mine)
        except BaseException:
            os.close(mine)
            raise
        if table._words[0] != MAGIC:
            table.close()
            raise ValueError(f"descriptor {fd} of process {pid} is no region table")
        return table

    def close(self) -> None:
        os.close(self.fd)
        self._words.release()
        del self._mapping

    # -- regions

    @property
    def version(self) -> int:
        return self._words[_VERSION]

    @property
    def epoch(self) -> int:
        return self._words[_EPOCH]

    def read(self) -> Snapshot:
        while True:
            version = self._words[_VERSION]
            count = self._words[_COUNT + version % 2]
            at = _REGIONS_AT + version % 2 * _HALF
            columns = [
                np.frombuffer(self._mapping, np.int64, count, at + column * MAX_REGIONS * 8).copy()
                for column in range(3)
            ]
            fence()
            if self._words[_VERSION] == version:
                return Snapshot(version, *columns)

    def publish(self, bases: Int64Array, ends: Int64Array, kinds: Int64Array) -> None:
        """Owner: these are the regions from now on."""
        version = self._words[_VERSION] + 1
        at = _REGIONS_AT + version % 2 * _HALF
        for column, values in enumerate((bases, ends, kinds)):
            np.frombuffer(self._mapping, np.int64, len(values), at + column * MAX_REGIONS * 8)[:] = values
        self._words[_COUNT + version % 2] = len(bases)
        fence()
        self._words[_VERSION] = version

    def advance(self) -> int:
        """Owner: begin a new epoch; the one that has ended."""
        former = self._words[_EPOCH]
        self._words[_EPOCH] = former + 1
        fence()
        return former

    # -- slots

    def assign(self, slot: int, token: int) -> None:
        """Owner: give a slot to a process."""
        at = _word(slot)
        for i in (_ECHO, _COPIES, _COPIES + 1):
            self._words[at + i] = 0
        self._words[at + _TOKEN] = token

    def revoke(self, slot: int) -> None:
        """Either side: from now on nothing is begun under this slot's token."""
        self._words[_word(slot) + _TOKEN] = 0
        fence()

    def holds(self, slot: int, token: int) -> bool:
        return self._words[_word(slot) + _TOKEN] == token

    def copies(self, slot: int, epoch: int) -> int:
        """How many copies of that epoch (or of another as even or odd) are under way."""
        return self._words[_word(slot) + _COPIES + epoch % 2]

    def count(self, slot: int, epoch: int, change: int) -> None:
        """Copier, under its lock: so many more copies are under way."""
        self._words[_word(slot) + _COPIES + epoch % 2] += change

    def echo(self, slot: int) -> int:
        return self._words[_word(slot) + _ECHO]


def slot_offsets(slot: int) -> tuple[int, int]:
    """Where a slot's token and its echo word lie in the table, in bytes."""
    return (_word(slot) + _TOKEN) * 8, (_word(slot) + _ECHO) * 8


def _word(slot: int) -> int:
    return (_HEADER + slot * _SLOT) // 8
