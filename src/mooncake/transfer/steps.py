"""Transfers as generators, so that several go on at once in one thread.

One yields when it has asked the master, and again when its bytes move without this thread (a GPU copies); one of which
nothing goes on by itself need not yield the second time.  Going on with it to its end waits for whatever is due.
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
    """Their results, in order.  While the bytes of one move, the next one's begin to, and the master is asked about the
    one after that."""
    all_of_them: list[_Going[Result]] = []
    going: deque[_Going[Result]] = deque()
    try:
        for steps in transfers:
            asked = _Going(steps)
            all_of_them.append(asked)
            going.append(asked)
            asked.step()
            if len(going) > 1:
                going[-2].step()
            if len(going) > 2:
                going.popleft().finish()
        if going:
            going[-1].step()
        while going:
            going.popleft().finish()
    finally:
        for one in going:
            one.steps.close()
    return [one.results[0] for one in all_of_them]
