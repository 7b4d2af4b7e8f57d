"""Transfers as generators, so that several go on at once in one thread.

One yields when it has asked the master, when it has prepared what it can before the answer, and again when its bytes
move without this thread (a GPU copies); one of which nothing goes on by itself need not yield the last time.  Going on
with it to its end waits for whatever is due.
"""

from collections import deque
from collections.abc import Generator, Iterable
from typing import Generic, TypeVar

Result = TypeVar("Result")
Transfer = Generator[None, None, Result]


def finish(steps: Transfer[Result]) -> Result:
    """Go on with it to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


class _Going(Generic[Result]):
    """A transfer and, once it has ended, what came of it."""

    def __init__(self, steps: Transfer[Result]) -> None:
        self.steps = steps
        self.results: list[Result] = []

    def step(self) -> None:
        if not self.results:
            try:
                next(self.steps)
            except StopIteration as end:
                self.results.append(end.value)

    def finish(self) -> None:
        while not self.results:
            self.step()


def overlap(transfers: Iterable[Transfer[Result]]) -> list[Result]:
    """Their results, in order.  The bytes of up to two move at a time, and meanwhile the master is asked about the next
    one and that is prepared; about the first two it is asked before anything moves."""
    all_of_them: list[_Going[Result]] = []
    moving: deque[_Going[Result]] = deque()
    first: _Going[Result] | None = None
    try:
        for steps in transfers:
            asked = _Going(steps)
            all_of_them.append(asked)
            moving.append(asked)
            asked.step()
            if len(all_of_them) == 1:
                asked.step()
                first = asked
                continue
            if first is not None:
                first.step()
                first = None
            asked.step()
            if len(moving) > 2:
                moving.popleft().finish()
            asked.step()
        while moving:
            moving.popleft().finish()
    finally:
        for one in moving:
            one.steps.close()
    return [one.results[0] for one in all_of_them]
