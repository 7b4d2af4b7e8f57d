"""Whether loading blocks is quicker than computing them again, by what both took lately.

Times are those that a request sees: of a load from the step that plans it until the workers have said that it is over,
of computing from the step that begins it until its first token.  Both are kept by length, because neither grows with it
evenly: a load has a latency, and attention makes long prompts dearer a token than short ones.

It says no only when it knows: both must have been measured near that length, and loading must be clearly slower.
Now and then it says yes all the same, since a load that is never tried is never measured again.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

_WEIGHT = 0.3  # of a new measurement
_MARGIN = 1.25  # a load must take so many times as long as computing
_TRY_EACH = 16  # of so many loads that would be declined one is made
_TRY_AFTER = 30.0  # seconds after which the last measured load says nothing any more
_NEAR = 1  # powers of two that a measurement may be away


class Measured(NamedTuple):
    """Averages of what was measured near one length."""

    tokens: float
    seconds: float
    at: float  # when, last


class Curve:
    """Seconds by tokens, as averages around each power of two."""

    def __init__(self) -> None:
        self._points: dict[int, Measured] = {}

    def add(self, tokens: int, seconds: float, now: float) -> None:
        size = tokens.bit_length()
        old = self._points.get(size)
        if old is None:
            self._points[size] = Measured(tokens, seconds, now)
        else:
            self._points[size] = Measured(
                old.tokens + _WEIGHT * (tokens - old.tokens), old.seconds + _WEIGHT * (seconds - old.seconds), now
            )

    def near(self, tokens: int) -> Measured | None:
        """The nearest measurement, of a longer one rather than of a shorter one; None if none is near."""
        size = tokens.bit_length()
        for away in range(_NEAR + 1):
            for each in (size + away, size - away):
                if each in self._points:
                    return self._points[each]
        return None


class Worth:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads, self._computed = Curve(), Curve()
        self._declined = 0  # since the last one that was made

    def loaded(self, tokens: int, seconds: float) -> None:
        """A load of `tokens` that brought all of them took so long."""
        self._loads.add(tokens, seconds, self._clock())
        self._declined = 0

    def computed(self, tokens: int, seconds: float) -> None:
        """So long until a request had its first token, of which `tokens` were computed."""
        self._computed.add(tokens, seconds, self._clock())

    def declines(self, tokens: int) -> bool:
        """Whether a load of `tokens` had better not be made.  Counts those that it declines."""
        load, compute = self._loads.near(tokens), self._computed.near(tokens)
        if load is None or compute is None:
            return False
        # Of a load what it takes at least: in proportion from a longer one, which leaves its latency out.  Of computing
        # what it takes at most: as a longer one, or from a shorter one as if attention were all of it.
        slow, quick = load.seconds, compute.seconds
        if load.tokens > tokens:
            slow *= tokens / load.tokens
        if compute.tokens < tokens:
            quick *= (tokens / compute.tokens) ** 2
        if slow <= _MARGIN * quick or self._clock() - load.at > _TRY_AFTER:
            return False
        self._declined = (self._declined + 1) % _TRY_EACH
        return self._declined > 0
