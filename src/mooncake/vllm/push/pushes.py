"""Prefill's worker: what is pushed to whom, from a request's first step to the release of its blocks.

Called by the engine's thread (`begin` ... `take_sent`), by the thread that knows what is computed (`computed`), by the
copying threads, and by the connections to decode (`ask` ... `sweep`).  One lock, never held for long.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np

from mooncake.transfer.pieces import Int64Array
from mooncake.vllm.push.copies import Copied, Copies, Job, Receiver
from mooncake.vllm.push.counts import Counts
from mooncake.vllm.push.items import Handed, Share
from mooncake.vllm.push.transfers import AskState, Place, Transfer
from mooncake.vllm.push.wire import Ask, Ended, Whole

logger = logging.getLogger("vllm.mooncake")

LOST_FOR = 3.0  # seconds that an Ask outlives its connection, so that it can come again
_REMEMBERED = 4096


class StepEnd(NamedTuple):
    """After a step the first `full` blocks of a transfer are whole, if it has not been started anew meanwhile."""

    transfer: Transfer
    generation: int
    full: int


class Pushes:
    def __init__(self, copies: Copies, layers: int, limit: float, tally: Counts) -> None:
        """`layers`: how many.  `limit`: seconds that blocks are kept for a decode that does not ask."""
        self._copies, self._layers, self._limit, self._tally = copies, layers, limit, tally
        self._lock = copies.lock
        self._transfers: dict[str, Transfer] = {}
        self._by_request: dict[str, Transfer] = {}
        self._asks: dict[tuple[str, int], tuple[Transfer, AskState]] = {}  # by worker and number
        self._ended: OrderedDict[tuple[str, int], str] = OrderedDict()  # how former ones ended
        self._past: OrderedDict[str, str] = OrderedDict()  # transfers that are over, and why
        self._sent: set[str] = set()

    # -- the engine's thread

    def begin(self, request: str, handed: Handed) -> None:
        """A request that decode asks for, or has asked for already."""
        with self._lock:
            transfer = self._transfers.get(handed.transfer)
            if transfer is None:
                transfer = self._transfers[handed.transfer] = Transfer(handed.transfer, self._layers)
            if transfer.request:
                logger.warning("Requests %s and %s have the same transfer_id", transfer.request, request)
                self._by_request.pop(transfer.request, None)
                self._restart(transfer)
                if transfer.finished:
                    self._sent.add(transfer.request)
                    transfer.finished = False
            transfer.request, transfer.tokens, transfer.digest = request, handed.tokens, handed.digest
            transfer.expires = 0.0
            self._by_request[request] = transfer
            for ask in list(transfer.asks):
                self._push(transfer, ask)

    def step(self, shares: Iterable[Share]) -> list[StepEnd]:
        """What is going to be whole after this step."""
        ends = []
        with self._lock:
            for share in shares:
                transfer = self._by_request.get(share.request)
                if transfer is None:
                    continue
                transfer.extend(share.new)
                ends.append(StepEnd(transfer, transfer.generation, share.full))
        return ends

    def preempted(self, request: str) -> None:
        """Its blocks are about to be overwritten: what is being copied from them counts for nothing."""
        with self._lock:
            transfer = self._by_request.get(request)
            if transfer is not None:
                self._restart(transfer)

    def finished(self, request: str) -> None:
        """vLLM keeps the request's blocks until it is among `take_sent`."""
        with self._lock:
            transfer = self._by_request.get(request)
            if transfer is None:
                self._sent.add(request)
                return
            transfer.finished = True
            transfer.expires = time.monotonic() + self._limit
            self._conclude(transfer)

    def dropped(self, name: str, reason: str) -> None:
        """It is not handed over; its blocks are not ours any more."""
        with self._lock:
            self._forget(name, reason)

    def take_sent(self) -> set[str]:
        """Finished requests that nobody wants anything of any more, since the last call."""
        with self._lock:
            sent, self._sent = self._sent, set()
        return sent

    # -- what is computed

    def computed(self, ends: list[StepEnd], layers: Int64Array) -> None:
        """These layers of what the step computed are there."""
        with self._lock:
            for transfer, generation, full in ends:
                if generation == transfer.generation:
                    transfer.ready[layers] = np.maximum(transfer.ready[layers], full)
                    for ask in list(transfer.asks):
                        self._push(transfer, ask)

    # -- connections

    def ask(self, receiver: Receiver, place: Place, expected: set[Place], ask: Ask) -> None:
        """`place`: of the worker that asks, one of the `expected`."""
        key = receiver.name, ask.number
        with self._lock:
            if key in self._ended:
                receiver.send(Ended(ask.number, self._ended[key]))
            elif key in self._asks:
                transfer, state = self._asks[key]
                state.copying -= self._copies.drop(state.receiver, state)
                state.receiver, state.lost_at = receiver, 0.0
                state.again()
                self._push(transfer, state)
            elif ask.transfer in self._past:
                self._end(key, receiver, self._past[ask.transfer] if ask.blocks else "")
            else:
                self._take(receiver, place, expected, ask)

    def _take(self, receiver: Receiver, place: Place, expected: set[Place], ask: Ask) -> None:
        transfer = self._transfers.get(ask.transfer)
        if transfer is None:
            transfer = self._transfers[ask.transfer] = Transfer(ask.transfer, self._layers)
            transfer.expires = time.monotonic() + self._limit
        transfer.expected = expected
        key = receiver.name, ask.number
        if not ask.blocks or receiver.route is None:
            transfer.through.add(place)
            self._end(key, receiver, "this rank of prefill has nothing for that one of decode" if ask.blocks else "")
            self._conclude(transfer)
            return
        state = AskState(receiver, place, ask)
        transfer.asks.append(state)
        self._asks[key] = transfer, state
        self._push(transfer, state)

    def cancel(self, receiver: Receiver, number: int) -> None:
        with self._lock:
            found = self._asks.get((receiver.name, number))
            if found is not None:
                self._stop(*found, "decode does not want it any more")

    def echoed(self, receiver: Receiver, stamp: float) -> None:
        with self._lock:
            receiver.stamp = max(receiver.stamp, stamp)
            self._copies.feed(receiver)

    def lost(self, receiver: Receiver) -> None:
        """Its connection is gone."""
        with self._lock:
            for _, ask in self._asks.values():
                if ask.receiver is receiver:
                    ask.copying -= self._copies.drop(receiver, ask)
                    ask.again()
                    ask.lost_at = time.monotonic()

    def sweep(self) -> None:
        """End what has waited too long."""
        now = time.monotonic()
        with self._lock:
            for transfer, ask in list(self._asks.values()):
                if ask.lost_at and now > ask.lost_at + LOST_FOR:
                    self._stop(transfer, ask, "decode has gone")
            for transfer in list(self._transfers.values()):
                if not transfer.expires or now < transfer.expires:
                    continue
                if transfer.finished and transfer.asks:
                    continue
                if transfer.finished:
                    self._tally.expired()
                    logger.warning(
                        "Request %s: no decode asked for it within %g s; its blocks are freed",
                        transfer.request,
                        self._limit,
                    )
                had = "keeps prompts" if transfer.finished else "has not begun it"
                self._forget(transfer.name, f"prefill {had} for {self._limit:g} s")

    # -- inside, with the lock held

    def _restart(self, transfer: Transfer) -> None:
        for ask in transfer.asks:
            ask.copying -= self._copies.drop(ask.receiver, ask)
        transfer.restart()

    def _push(self, transfer: Transfer, ask: AskState) -> None:
        if transfer.request and ask.ending is None:
            ask.ending = _difference(transfer, ask)
        for layers, start, end in ask.take(transfer.ready):
            ask.copying += 1
            ours, theirs = transfer.table[start:end], ask.blocks[start - ask.first : end - ask.first]
            wanted, done = partial(ask.wants, ask.receiver), partial(self._job_ended, transfer, ask)
            self._copies.add(Job(ask.receiver, layers, ours, theirs, wanted, done, ask))
        self._settle(transfer, ask)

    def _job_ended(self, transfer: Transfer, ask: AskState, copied: Copied) -> None:
        ask.job_ended(copied)
        if ask.ending is not None:
            ask.copying -= self._copies.drop(ask.receiver, ask)
        self._push(transfer, ask)

    def _stop(self, transfer: Transfer, ask: AskState, reason: str) -> None:
        ask.ending = ask.ending or reason
        ask.copying -= self._copies.drop(ask.receiver, ask)
        self._settle(transfer, ask)

    def _settle(self, transfer: Transfer, ask: AskState) -> None:
        """End an Ask that can be ended; else say how much of it is there."""
        if ask not in transfer.asks or ask.copying or (ask.ending is None and not ask.is_whole()):
            news = ask.news()
            if news:
                ask.receiver.send(Whole(ask.number, news))
            return
        transfer.asks.remove(ask)
        transfer.through.add(ask.place)
        key = ask.receiver.name, ask.number
        del self._asks[key]
        self._end(key, ask.receiver, ask.ending or "")
        if ask.ending is None:
            self._tally.sent(ask.sum.seconds, ask.sum.size, ask.sum.pieces)
        else:
            self._tally.failed_to_send()
            logger.info("Transfer %s to %s has ended: %s", transfer.name, ask.receiver.session, ask.ending)
        self._conclude(transfer)

    def _end(self, key: tuple[str, int], receiver: Receiver, reason: str) -> None:
        self._ended[key] = reason
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        receiver.send(Ended(key[1], reason))

    def _conclude(self, transfer: Transfer) -> None:
        if transfer.finished and transfer.is_over():
            self._forget(transfer.name, "it has been handed over already")

    def _forget(self, name: str, reason: str) -> None:
        self._past[name] = reason
        if len(self._past) > _REMEMBERED:
            self._past.popitem(last=False)
        transfer = self._transfers.pop(name, None)
        if transfer is None:
            return
        self._by_request.pop(transfer.request, None)
        if transfer.finished:
            self._sent.add(transfer.request)
            transfer.finished = False
        for ask in list(transfer.asks):
            self._stop(transfer, ask, reason)


def _difference(transfer: Transfer, ask: AskState) -> str | None:
    """In what the halves' prompts differ."""
    if ask.tokens != transfer.tokens:
        return f"decode's prompt has {ask.tokens} tokens, prefill's {transfer.tokens}; they must be the same"
    if ask.digest and transfer.digest and ask.digest != transfer.digest:
        return "decode's prompt is another one than prefill's"
    return None
