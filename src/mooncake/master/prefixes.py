"""How far lists of keys are there: what schedulers of engines ask before they load a prompt's blocks.

A model's layers form groups, each with values of its own for a block; a group needs all blocks of a prompt, or only
the last ones (see `messages.Need`).  A place counts if it counts for all groups, so the search goes down from a list's
end: a group that lacks something names the greatest place below that does not need it, and all look again there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from mooncake.errors import ErrorCode, StoreError
from mooncake.master.directory import Directory
from mooncake.master.handlers import Reply, handles, in_steps
from mooncake.master.limits import check_count
from mooncake.master.requests import EXIST_AT_ONCE, from_the_end
from mooncake.rpc import messages as m
from mooncake.rpc.message import Message

if TYPE_CHECKING:
    from mooncake.master.service import Session

_LOOKED_UP = 512  # keys in one step


@handles(m.Prefix)
def _prefix(session: Session, request: m.Prefix) -> Reply:
    service, needs = session.service, request.needs
    _check(request)
    count = sum(len(need.heads) * (len(tails) // need.every) for need in needs for tails in request.tails)
    service.counters.request("exist_key", count, 0)
    small = count <= EXIST_AT_ONCE
    if not small:
        check_count(count)
    directory = service.directory
    if len(needs) == 1 and request.step == 1 and not needs[0].last:
        heads = needs[0].heads
        if not small:
            return _prefix_many(session, heads, request.tails)
        now = directory.clock()
        return m.PrefixReply([directory.prefix(heads, tails, now) for tails in request.tails])
    steps = places(directory, request)
    return _reply_to(steps) if small else in_steps(steps, lambda: None)


def _check(request: m.Prefix) -> None:
    needs, step = request.needs, request.step
    if not needs or not all(need.heads for need in needs):
        raise StoreError(ErrorCode.INVALID_PARAMS, "no heads of keys; at least one is needed")
    for need in needs:
        if need.every < 1 or step < 1 or step % need.every or need.last < 0 or need.skip < 0:
            raise StoreError(
                ErrorCode.INVALID_PARAMS,
                f"a need of every {need.every}, last {need.last} and skip {need.skip} at steps of {step}; steps must "
                "be multiples of every, and none may be negative",
            )


async def _prefix_many(session: Session, heads: list[str], lists: list[list[str]]) -> Message:
    """In slices: first how far the lists reach, then the leases, from the end."""
    directory = session.service.directory
    step = max(1, EXIST_AT_ONCE // len(heads))
    lengths = []
    for tails in lists:
        length = 0
        for at in range(0, len(tails), step):
            some = tails[at : at + step]
            reached = directory.prefix(heads, some, directory.clock(), lease=False)
            length += reached
            await asyncio.sleep(0)
            if reached < len(some):
                break
        for part in from_the_end(length, step):
            directory.prefix(heads, tails[part], directory.clock())
            await asyncio.sleep(0)
        lengths.append(length)
    return m.PrefixReply(lengths)


def _reply_to(steps: Generator[None, None, Message]) -> Message:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            reply: Message = end.value
            return reply


def places(directory: Directory, request: m.Prefix) -> Generator[None, None, Message]:
    """The reply, in steps of so many keys that the loop may be held for one."""
    found = []
    for tails in request.tails:
        searches = [_Search(directory, need, tails, request.step) for need in request.needs]
        searches.sort(key=lambda search: search.need.last)  # those that need everything find the end soonest
        place = len(tails) // request.step * request.step
        agreed = 0
        waiting = deque(searches)
        while agreed < len(searches):  # in turn, until all in a row leave the place as it is
            search = waiting[0]
            waiting.rotate(-1)
            lower = yield from search.down_from(place)
            agreed = agreed + 1 if lower == place else 1
            place = lower
        for search in reversed(searches):
            for keys in search.keys_in_slices(place):
                directory.exist(keys, directory.clock())
                yield
        found.append(place)
    return m.PrefixReply(found)


class _Search:
    """For one need of one list: the greatest place that counts.  What was found once is not looked up again."""

    def __init__(self, directory: Directory, need: m.Need, tails: list[str], step: int) -> None:
        self.need = need
        self._directory = directory
        self._tails = tails[need.every - 1 :: need.every]
        self._step = step
        self._slice = max(1, _LOOKED_UP // len(need.heads))
        self._known = range(0)  # blocks that are there

    def down_from(self, place: int) -> Generator[None, None, int]:
        """The greatest place up to `place` that counts."""
        find = self._first_gap if not self.need.last else self._last_gap
        while place:
            gap = yield from find(self._blocks(place))
            if gap is None:
                return place
            place = (gap + self.need.skip) * self.need.every // self._step * self._step
        return 0

    def keys_in_slices(self, place: int) -> Iterator[list[str]]:
        """What is needed up to `place`, from the end."""
        blocks = self._blocks(place)
        for some in from_the_end(len(blocks), self._slice):
            yield self._keys(blocks[some])

    def _blocks(self, place: int) -> range:
        last, end = self.need.last, max(0, place // self.need.every - self.need.skip)
        return range(max(0, end - last) if last else 0, end)

    def _keys(self, blocks: range) -> list[str]:
        return [head + self._tails[block] for block in blocks for head in self.need.heads]

    def _first_gap(self, blocks: range) -> Generator[None, None, int | None]:
        """From the start: what is there of the blocks grows, and is looked up once."""
        while self._known.stop < blocks.stop:
            some = range(self._known.stop, min(blocks.stop, self._known.stop + self._slice))
            found = self._directory.find(self._keys(some))
            yield
            whole = found.index(None) // len(self.need.heads) if None in found else len(some)
            self._known = range(some.start + whole)
            if whole < len(some):
                return some.start + whole
        return None

    def _last_gap(self, blocks: range) -> Generator[None, None, int | None]:
        """From the end, as the places go down."""
        if blocks.stop > self._known.stop or blocks.stop <= self._known.start:
            self._known = range(blocks.stop, blocks.stop)
        while self._known.start > blocks.start:
            some = range(max(blocks.start, self._known.start - self._slice), self._known.start)
            found = self._directory.find(self._keys(some))
            yield
            for i in range(len(found) - 1, -1, -1):
                if found[i] is None:
                    self._known = range(0)
                    return some.start + i // len(self.need.heads)
            self._known = range(some.start, self._known.stop)
        return None
