"""The one interface between the store client and the ways bytes can go.  Its transfers are steps (transfer.steps)."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import NamedTuple

from mooncake.rpc.data_messages import WriteRecord
from mooncake.transfer.checksums import Sums
from mooncake.transfer.pieces import Pieces


class Leased(NamedTuple):
    """By which master's leave something is read: its term, and when it was asked (seconds, boot clock)."""

    term: int
    sent: float


class Transport(ABC):
    """Moves vectors between this process's memory and one segment.  Thread-safe; every call ends within its limit."""

    name: str

    @abstractmethod
    def put_steps(
        self, term: int, records: list[WriteRecord], pieces: Pieces, trusted: bool, final: bool, summed: bool
    ) -> Generator[None, None, list[int]]:
        """Write `records` of master `term` and their bytes; `pieces` cover the records' extents in order.

        A code a record: 0 whole and marked so; INVALID_WRITE if its grant no longer stands.  Raises TransferError
        if nothing can be said of any of them.  `trusted`: the memory is registered, so its addresses are valid.
        `final`: where the memory is mapped here, 0 shall mean that the master that granted it, or whoever follows it,
        will find it so.  `summed`: some records' checksums are PENDING; they are found out on the way, and filled in.
        """

    @abstractmethod
    def get_steps(
        self, ranges: list[int], pieces: Pieces, trusted: bool, leased: Leased | None, sums: Sums | None
    ) -> Generator[None, None, None]:
        """Read `ranges` (flat: offset, length, ...) of the segment into `pieces`, in order; `sums` are taken of them.
        `leased` None: its server has lent them.  Raises TransferError, StoreError (LEASE_EXPIRED) if the lease does not
        count any more."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the segment; no call is under way."""


def merge(ranges: list[int]) -> list[int]:
    """The same ranges with adjoining ones made one."""
    merged = ranges[:2]
    for at in range(2, len(ranges), 2):
        offset, length = ranges[at], ranges[at + 1]
        if offset == merged[-2] + merged[-1]:
            merged[-1] += length
        else:
            merged += (offset, length)
    return merged
