"""What subscribers to KV events have missed: sent again to who asks, or told anew to all.

The last messages are kept.  Who asks for one of them on the replay socket, in the form that vLLM's publisher has (an
empty frame and a number, 8 bytes, big end first), gets it and all that followed, each as [empty, number, message], and
an end with number -1.  Who asks for an older one gets what is kept, and everything there is now is *told anew*: one
`cleared`, and `stored` for every value, among the other events and at a bounded pace, so that whoever applies them in
order is exact again.  So it is when events were lost here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator

import zmq
import zmq.asyncio

from mooncake.errors import ConfigError
from mooncake.master.catalog import Catalog
from mooncake.master.counters import Counters
from mooncake.master.kv_events import KvEvents
from mooncake.master.objects import GONE

log = logging.getLogger("mooncake.master")

KEPT = 1000  # messages, of up to 25 KB
_AT_ONCE = 200  # values told, every
_STEP_S = 0.01
_RETELL_PAUSE_S = 5.0  # between the end of one and the beginning of the next
_REPLY_STEP = 50  # messages sent in one step of the loop
_END = (-1).to_bytes(8, "big", signed=True)


class KvReplay:
    """Serves the replay socket at `endpoint` from now on: ConfigError if it cannot be bound."""

    def __init__(self, events: KvEvents, catalog: Catalog, counters: Counters, endpoint: str, kept: int = KEPT) -> None:
        self._events = events
        self._catalog = catalog
        self._counters = counters
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._wanted = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.set_hwm(kept + 8)
        try:
            self._socket.bind(endpoint)
        except (zmq.ZMQError, ValueError) as error:
            self._socket.close()
            self._context.term()
            raise ConfigError(
                f"KV events cannot be replayed at {endpoint!r} ({getattr(error, 'strerror', None) or error}): "
                f"set --kv_events_replay_endpoint to a free address such as tcp://0.0.0.0:5558."
            ) from None
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._retell_when_wanted())]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._socket.close()
        self._context.term()

    def sent(self, number: int, message: bytes) -> None:
        """This has been published."""
        self._kept.append((number, message))

    def lost(self) -> None:
        """Events went that nobody was told of."""
        self._wanted.set()

    async def _serve(self) -> None:
        while True:
            who, *_, asked = await self._socket.recv_multipart()
            if len(asked) == 8:
                await self._reply(who, int.from_bytes(asked, "big"))

    async def _reply(self, who: bytes, first: int) -> None:
        kept = list(self._kept)
        if kept and kept[0][0] > first:
            self._wanted.set()
        replies = [(number, message) for number, message in kept if number >= first]
        with contextlib.suppress(zmq.ZMQError):  # who has gone
            for at, (number, message) in enumerate(replies):
                self._socket.send_multipart((who, b"", number.to_bytes(8, "big"), message), zmq.NOBLOCK)
                if at % _REPLY_STEP == _REPLY_STEP - 1:
                    await asyncio.sleep(0)
            self._socket.send_multipart((who, b"", _END, b""), zmq.NOBLOCK)

    async def _retell_when_wanted(self) -> None:
        while True:
            await self._wanted.wait()
            while self._events.is_clearing:  # everything is being told now
                await asyncio.sleep(_STEP_S)
            self._wanted.clear()
            log.info("KV events: all values are told anew")
            self._counters["mooncake_kv_events_retold_total"] += 1
            for _ in self._retell():
                await asyncio.sleep(_STEP_S)
            await asyncio.sleep(_RETELL_PAUSE_S)

    def _retell(self) -> Iterator[None]:
        """In steps."""
        with self._events.clearing():
            for some in self._catalog.objects.slices():
                for at in range(0, len(some), _AT_ONCE):
                    for obj in some[at : at + _AT_ONCE]:
                        while self._events.is_crowded:
                            yield
                        if not obj.flags & GONE:
                            self._events.changed(obj)
                    yield
