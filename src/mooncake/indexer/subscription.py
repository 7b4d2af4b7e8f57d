"""One publisher followed: its messages applied to a holding in order, and what was missed asked for again.

Messages are numbered.  After a gap the missing ones are asked of the publisher's replay socket, if it has one; what
cannot be had makes everything unsure, and the holding is emptied.  So is that of a publisher that has begun anew, or
is away for longer than a moment.  Masters of which one leads are followed as one publisher: only the leader publishes,
and a new one has begun anew.  An entry that should not be there is so corrected at the next message at the latest.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from mooncake.indexer.config import Registration
from mooncake.indexer.events import decode
from mooncake.indexer.index import Index

logger = logging.getLogger(__name__)

_AWAY_S = 5.0
_REPLAY_S = 5.0  # between two replayed messages
_HEARTBEAT_MS = 3000
_MOST_UNREAD = 10_000
_END = (-1).to_bytes(8, "big", signed=True)
_UP = zmq.Event.HANDSHAKE_SUCCEEDED
_DOWN = zmq.Event.DISCONNECTED


@dataclass(slots=True)
class Counts:
    messages: int = 0
    events: int = 0
    gaps: int = 0
    replayed: int = 0
    emptied: int = 0
    misread: int = 0


class Subscription:
    """Follows one registration's publisher from `start` to `close`.  Raises ValueError for an impossible address."""

    def __init__(self, registration: Registration, index: Index, context: zmq.asyncio.Context) -> None:
        self.registration = registration
        self.holding = index.join()
        self.counts = Counts()
        self.connected = False
        self._index = index
        self._context = context
        self._last: int | None = None  # the newest message that was applied
        self._last_time = 0.0
        self._in_turn = asyncio.Lock()
        self._away: asyncio.TimerHandle | None = None
        self._socket = context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.set_hwm(_MOST_UNREAD)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._monitor = self._socket.get_monitor_socket(_UP | _DOWN)
        self._socket.subscribe(b"")
        try:
            for endpoint in registration.endpoints:
                self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            index.leave(self.holding)
            raise ValueError(f"endpoint {registration.endpoint} cannot be used: {error.strerror}") from None
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._away is not None:
            self._away.cancel()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._index.leave(self.holding)

    async def _follow(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            async with self._in_turn:
                if len(frames) >= 2 and len(frames[-2]) == 8:
                    await self._take(int.from_bytes(frames[-2], "big"), frames[-1])

    async def _watch(self) -> None:
        """Whether the publisher is there."""
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            self.connected = event == _UP
            if self._away is not None:
                self._away.cancel()
            self._away = None
            if event == _UP:
                async with self._in_turn:
                    await self._catch_up()
            else:
                self._away = asyncio.get_running_loop().call_later(_AWAY_S, self._give_up)

    def _give_up(self) -> None:
        logger.warning(
            "%s is not there any more: what %s held is forgotten, and requests are not sent by it",
            self.registration.endpoint, self.registration.instance_id,
        )  # fmt: skip
        self._forget()

    async def _take(self, number: int, payload: bytes) -> None:
        last = self._last
        if last is not None and number <= last:
            if not self._is_newer(payload):
                return  # it was replayed already
            logger.info("%s has begun anew", self.registration.endpoint)
            self._forget()
            await self._catch_up()
        elif last is not None and number > last + 1:
            self.counts.gaps += 1
            await self._catch_up()
        self._apply(number, payload)

    def _is_newer(self, payload: bytes) -> bool:
        try:
            return decode(payload).time > self._last_time
        except ValueError:
            return False

    def _apply(self, number: int, payload: bytes) -> None:
        """The message `number`, unless it was applied; what is missing before it is lost for good."""
        if self._last is not None and number <= self._last:
            return
        if self._last is not None and number > self._last + 1:
            self._forget()
        self._last = number
        self.counts.messages += 1
        try:
            message = decode(payload)
            self._index.apply(self.holding, message.events)
        except (ValueError, TypeError, OverflowError) as error:
            logger.warning("%s: message %d is lost: %s", self.registration.endpoint, number, error)
            self.counts.misread += 1
            self._index.clear(self.holding)
            return
        self._last_time = message.time
        self.counts.events += len(message.events)

    def _forget(self) -> None:
        """Nothing that is held is sure, or will be said to be gone."""
        if len(self.holding):
            self.counts.emptied += 1
        self._index.clear(self.holding)
        self._last = None

    async def _catch_up(self) -> None:
        """Ask for all messages after the last one; for all that there are if the publisher has begun anew."""
        address = self.registration.replay_endpoint
        if not address:
            return
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        try:
            socket.connect(address)
            if self._last is not None and not await self._go_on(socket, self._last):
                self._forget()
            if self._last is None:
                await self._go_on(socket, 0)
        except (TimeoutError, zmq.ZMQError, ValueError) as error:
            logger.warning("%s does not replay what was missed: %s", address, error or "no answer")
        finally:
            with contextlib.suppress(zmq.ZMQError):
                socket.close()

    async def _go_on(self, socket: zmq.asyncio.Socket, first: int) -> bool:
        """Apply the publisher's messages from `first` on; False if that one, applied last, is another one there."""
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        known, other = self._last is None, False
        while True:
            async with asyncio.timeout(_REPLAY_S):
                *_, number, payload = await socket.recv_multipart()
            if number == _END:
                return known and not other
            at = int.from_bytes(number, "big")
            if not known and at == first:
                other = decode(payload).time != self._last_time
            elif not other:
                self._apply(at, payload)
                self.counts.replayed += 1
            known = True
