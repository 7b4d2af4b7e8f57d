"""A bounded part of the segment's memory in which values from disk wait to be copied by who asked for them.

It lies behind the part that the master gives out.  A *ticket* is one request's room; it ends when the reader hands it
back or when its time is over, whichever is first: a reader counts that time from when it sent its request, and believes
nothing that it copied later."""

import threading
import time
from typing import NamedTuple

from mooncake.segment.disk.files import BLOCK, blocks


class Ticket(NamedTuple):
    number: int
    offset: int
    length: int
    ends: float  # monotonic; inf while it is being filled


class Staging:
    """`size` bytes from `start` on, both multiples of BLOCK."""

    def __init__(self, start: int, size: int, ttl: float) -> None:
        assert start % BLOCK == 0
        self.size = size
        self.ttl = ttl
        self._start = start
        self._number = 0
        self._taken: list[Ticket] = []  # by offset
        self._freed = threading.Condition()

    @property
    def used(self) -> int:
        return sum(ticket.length for ticket in list(self._taken))

    def take(self, length: int, wait: float) -> Ticket | None:
        """Room for `length` bytes, which is filled next; None if none came free within `wait` seconds."""
        length = blocks(length)
        if length > self.size:
            return None
        give_up = time.monotonic() + wait
        with self._freed:
            while True:
                now = time.monotonic()
                self._taken = [ticket for ticket in self._taken if ticket.ends > now]
                place = self._find(length)
                if place is not None:
                    index, offset = place
                    self._number += 1
                    ticket = Ticket(self._number, offset, length, float("inf"))
                    self._taken.insert(index, ticket)
                    return ticket
                if now >= give_up:
                    return None
                soonest = min([ticket.ends for ticket in self._taken] + [give_up])
                self._freed.wait(max(0.001, soonest - now))

    def lend(self, ticket: Ticket, asked: float) -> None:
        """It is filled: its reader, whose request came at `asked` (monotonic), has until `ttl` after that."""
        with self._freed:
            at = self._taken.index(ticket)
            self._taken[at] = ticket._replace(ends=asked + self.ttl)

    def give_back(self, numbers: list[int]) -> None:
        """These tickets' readers are done."""
        with self._freed:
            self._taken = [ticket for ticket in self._taken if ticket.number not in numbers]
            self._freed.notify_all()

    def _find(self, length: int) -> tuple[int, int] | None:
        at = self._start
        for index, ticket in enumerate(self._taken):
            if ticket.offset - at >= length:
                return index, at
            at = ticket.offset + ticket.length
        return (len(self._taken), at) if self._start + self.size - at >= length else None
