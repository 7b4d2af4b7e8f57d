"""Transfers as generators: one that has begun and goes on without this thread (a GPU copies) yields, so that the next
one can be prepared meanwhile; going on with it ends it.
"""

from collections import deque
from collections.abc import Generator, Iterable
from typing import TypeVar

AT_ONCE = 2  # transfers that go on
Result = TypeVar("Result")


def finish(steps: Generator[None, None, Result]) -> Result:
    """Go on with it to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def overlap(transfers: Iterable[Generator[None, None, Result]]) -> list[Result]:
    """Their results, in order; AT_ONCE of them go on at a time."""
    results: list[list[Result]] = []
    going: deque[tuple[Generator[None, None, Result], list[Result]]] = deque()

    def end_first() -> None:
        steps, place = going.popleft()
        place.append(finish(steps))

    try:
        for steps in transfers:
            if len(going) == AT_ONCE:
                end_first()
            place: list[Result] = []
            results.append(place)
            try:
                next(steps)
            except StopIteration as end:
                place.append(end.value)
            else:
                going.append((steps, place))
        while going:
            end_first()
    finally:
        for steps, _ in going:
            steps.close()
    return [place[0] for place in results]
