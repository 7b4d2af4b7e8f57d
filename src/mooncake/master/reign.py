"""How long an elected master may serve: until shortly before its entry in the back end can be gone.

One thread renews (`master.candidate`); the serving loop looks before it answers.  Nothing here knows a back end.
"""

import time
from collections.abc import Callable

from mooncake.election.base import LEASE_S, MARGIN_S, View


def boot_clock() -> float:
    """Seconds on a clock that goes on through suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Reign:
    """`view` is what was published.  Once ended it never holds again.  `on_end` is called once, in any thread."""

    def __init__(self, view: View, asked: float) -> None:
        """`asked`: when the election was (boot clock)."""
        self.view = view
        self.on_end: Callable[[], None] = lambda: None
        self.reason = ""  # why it has ended
        self.least_term = 0  # that the next one should be above
        self._until = asked + LEASE_S - MARGIN_S

    def renewed(self, asked: float) -> None:
        self._until = asked + LEASE_S - MARGIN_S

    @property
    def left_s(self) -> float:
        return self._until - boot_clock()

    def holds(self) -> bool:
        """Whether nobody else can have been elected yet."""
        if not self.reason and self.left_s <= 0:
            self.end(f"it could not be renewed for {LEASE_S - MARGIN_S:g} s")
        return not self.reason

    def end(self, reason: str, least_term: int = 0) -> None:
        if not self.reason:
            self.reason, self.least_term = reason, least_term
            self.on_end()
