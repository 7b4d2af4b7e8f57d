"""What an election needs of a back end, and how long things take.

The entry of who leads goes LEASE_S after it was last renewed.  A leader counts from *before* it asked for that, and
stops MARGIN_S earlier, so it has stopped when another one can begin.  That is for continuity only: should a back end
lose its memory, or a clock lie, two leaders do no harm, since segments serve the higher term (see `transfer.table`).
"""

import time
from abc import ABC, abstractmethod
from typing import NamedTuple

LEASE_S = 5.0
MARGIN_S = 0.5
RENEW_S = 1.0
POLL_S = 0.5  # how often a standby looks whether nobody leads

TERM_STEP = 60_000
"""How far apart terms are at least.  Sequence numbers begin at a multiple of the term: a leader may give out so many of
those steps before it meets the next one's, which is more than can be put in the life of any (see master.granting)."""


class View(NamedTuple):
    """Who leads: the address that he has published, host:port, and his term."""

    address: str
    term: int


class Outcome(NamedTuple):
    """Of a candidacy: who leads now (None: not known), and whether that is the candidate himself, newly elected."""

    view: View | None
    won: bool


class Election(ABC):
    """The elections of one cluster.  Calls may take as long as `limit`, in seconds; all raise MetadataError."""

    limit = 3.0

    @abstractmethod
    def look(self) -> View | None:
        """Who leads, by the latest that is known."""

    @abstractmethod
    def stand(self, address: str) -> Outcome:
        """Become the leader if there is none."""

    @abstractmethod
    def renew(self, view: View) -> bool:
        """Go on leading; False if somebody else was elected, or nobody leads any more."""

    @abstractmethod
    def resign(self, view: View, least_term: int) -> None:
        """Lead no longer, if one still does.  The next term is higher than `least_term`."""


def next_term(former: int) -> int:
    """Milliseconds since 1970, as the terms of masters that stand alone are, unless that is not well above the former
    one: clocks differ."""
    return max(int(time.time() * 1000), former + TERM_STEP)
