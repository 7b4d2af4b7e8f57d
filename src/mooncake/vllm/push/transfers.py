"""Prefill's transfers: what is computed of each, who has asked for it, what has been pushed.

A plain state machine; `pushes` calls it with its lock held.  A block is pushed once it is whole in a layer (`ready`);
what was pushed before a preemption is pushed again, after the copies that were under way have ended: they may have read
blocks that were somebody else's by then.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mooncake.transfer.pieces import Int64Array
from mooncake.vllm.push.copies import CHUNK, Copied, Receiver
from mooncake.vllm.push.geometry import chunks
from mooncake.vllm.push.wire import Ask

Place = tuple[int, int]  # (tensor, pipeline) rank of a worker of decode


class Piece(NamedTuple):
    """Blocks [start, end) of a prompt, of some layers."""

    layers: Int64Array
    start: int
    end: int


class AskState:
    """One worker of decode's Ask for one transfer, until it has ended."""

    def __init__(self, receiver: Receiver, place: Place, ask: Ask) -> None:
        """`receiver` has a route."""
        self.receiver, self.place, self.number = receiver, place, ask.number
        self.first, self.blocks = ask.first, np.frombuffer(ask.blocks, np.int64)
        self.tokens, self.digest = ask.tokens, ask.digest
        assert receiver.route is not None
        self.layers = receiver.route.layers
        self.sent = np.full(len(receiver.route.block_bytes), ask.first, np.int64)  # by layer: handed to the threads
        self.copying = 0  # jobs that have not ended
        self.draining = False  # those are of before a preemption
        self.ending: str | None = None  # why it ends without being whole
        self.whole = 0  # how many of its blocks decode was told of
        self.lost_at = 0.0  # when its connection broke, 0 if it is there
        self.sum = Copied(0.0, 0, 0)

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)

    def is_whole(self) -> bool:
        return not self.draining and bool((self.sent[self.layers] >= self.end).all())

    def wants(self, receiver: Receiver) -> bool:
        """Whether a job that was made for this receiver still counts."""
        return self.receiver is receiver and not (self.draining or self.lost_at) and self.ending is None

    def news(self) -> int:
        """How many of its first blocks are there, if that can be said, and is more than was said before; else 0."""
        if self.copying or self.draining or self.lost_at or self.ending is not None or not len(self.layers):
            return 0
        whole = int(self.sent[self.layers].min()) - self.first
        if whole <= self.whole:
            return 0
        self.whole = whole
        return whole

    def take(self, ready: Int64Array) -> Iterator[Piece]:
        """What can be pushed now, as jobs of about CHUNK bytes.  `ready`: by layer, how many blocks are whole."""
        if self.draining or self.ending is not None or self.lost_at or self.receiver.route is None:
            return
        upto = np.minimum(ready, self.end)
        layers = self.layers[upto[self.layers] > self.sent[self.layers]]
        while len(layers):
            start, end = int(self.sent[layers[0]]), int(upto[layers[0]])
            alike = (self.sent[layers] == start) & (upto[layers] == end)
            same, layers = layers[alike], layers[~alike]
            self.sent[same] = end
            each = int(self.receiver.route.block_bytes[same].max())
            blocks = max(1, CHUNK // each)
            if blocks >= end - start:
                at_once = max(1, blocks // (end - start))
                for low, high in chunks(0, len(same), at_once):
                    yield Piece(same[low:high], start, end)
            else:
                for layer in same:
                    for low, high in chunks(start, end, blocks):
                        yield Piece(np.array([layer]), low, high)

    def again(self) -> None:
        """Nothing of what was sent counts."""
        self.sent[:] = self.first
        self.draining = self.copying > 0

    def job_ended(self, copied: Copied) -> None:
        self.copying -= 1
        if self.draining:
            self.draining = self.copying > 0
        elif copied.reason:
            self.ending = self.ending or copied.reason
        seconds, size, pieces, _ = self.sum
        self.sum = Copied(seconds + copied.seconds, size + copied.size, pieces + copied.pieces)


class Transfer:
    """One prompt.  It may be asked for before its request has come."""

    def __init__(self, name: str, layers: int) -> None:
        self.name = name
        self.request = ""
        self.tokens = self.digest = 0
        self.table = np.empty(0, np.int64)
        self.generation = 0  # counts its starts
        self.ready = np.zeros(layers, np.int64)  # by layer: how many blocks are whole
        self.asks: list[AskState] = []
        self.through: set[Place] = set()  # workers of decode that want nothing more of it
        self.expected: set[Place] | None = None  # all of them, once one has said how many there are
        self.finished = False  # vLLM keeps the blocks of its request for us
        self.expires = 0.0

    def extend(self, new: list[int]) -> None:
        """The request's table has these blocks more."""
        self.table = np.concatenate((self.table, np.array(new, np.int64)))

    def restart(self) -> None:
        """It has no blocks any more."""
        self.table = np.empty(0, np.int64)
        self.generation += 1
        self.ready[:] = 0
        for ask in self.asks:
            ask.again()

    def is_over(self) -> bool:
        """Whether nobody wants anything more of it."""
        return not self.asks and self.expected is not None and self.through >= self.expected
