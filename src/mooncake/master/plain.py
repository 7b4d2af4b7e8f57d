"""The columns of an AnnouncePlain: records of values that lie in one extent and have nothing special about them."""

from __future__ import annotations

from array import array
from itertools import compress
from typing import NamedTuple

from mooncake.errors import ErrorCode, StoreError
from mooncake.rpc.messages import AnnouncePlain, Record
from mooncake.rpc.record_messages import Body
from mooncake.transfer.table import COMPLETE


class Plain(NamedTuple):
    """Column for column, one entry a record; `slots` as Object.slots, `checksums` empty if no record has one."""

    client: str
    keys: list[str]
    seqs: list[int]
    sizes: list[int]
    offsets: list[int]
    slots: list[int]
    checksums: list[int]

    @property
    def sound(self) -> bool:
        """Whether each may be right by itself."""
        return (
            all(self.keys)
            and min(self.seqs, default=1) > 0
            and max(self.seqs, default=1) < 1 << 62
            and min(self.sizes, default=1) > 0
            and all(run & 255 for run in self.slots)
        )

    def some(self, begin: int, end: int) -> Plain:
        """Those of a range."""
        part = slice(begin, end)
        return Plain(
            self.client, self.keys[part], self.seqs[part], self.sizes[part], self.offsets[part], self.slots[part],
            self.checksums[part],
        )  # fmt: skip

    def of(self, which: list[bool]) -> Plain:
        """Those for which `which` is true."""
        columns = (self.seqs, self.sizes, self.offsets, self.slots, self.checksums)
        numbers = [list(compress(column, which)) for column in columns]
        return Plain(self.client, list(compress(self.keys, which)), *numbers)

    def record(self, i: int) -> Record:
        """One, as an Announce would have it."""
        first, count = self.slots[i] >> 8, self.slots[i] & 255
        body = Body(self.keys[i], self.sizes[i], [self.offsets[i], self.sizes[i]], client=self.client)
        body.checksum = self.checksums[i] if self.checksums else 0
        return Record(list(range(first, first + count)), COMPLETE, 0, self.seqs[i], body)


def columns_of(message: AnnouncePlain) -> Plain:
    """Raises StoreError if they differ in length."""
    count = len(message.keys)
    columns = []
    for raw in (message.seqs, message.sizes, message.offsets, message.slots):
        if len(raw) != 8 * count:
            raise StoreError(ErrorCode.INVALID_PARAMS, "columns of announced records differ in length")
        columns.append(array("Q", raw).tolist())
    if len(message.checksums) not in (0, 8 * count):
        raise StoreError(ErrorCode.INVALID_PARAMS, "columns of announced records differ in length")
    columns.append(array("Q", message.checksums).tolist())
    return Plain(message.client, message.keys, *columns)
