"""Prefill's side of the connections: takes what decode says to `Pushes`, and keeps the lease going."""

import asyncio
import logging
import time
from functools import partial
from typing import Any

from mooncake.errors import ConfigError
from mooncake.security.anteroom import Anteroom
from mooncake.security.secret import read_secret
from mooncake.transfer.listening import join_host, listen_address
from mooncake.vllm.push.copies import Receiver
from mooncake.vllm.push.geometry import Layers
from mooncake.vllm.push.heads import receivers
from mooncake.vllm.push.loop import LoopThread
from mooncake.vllm.push.proofs import first_message
from mooncake.vllm.push.pushes import Pushes
from mooncake.vllm.push.routes import Ranks, make_route
from mooncake.vllm.push.tls import serve_streams
from mooncake.vllm.push.transfers import Place
from mooncake.vllm.push.wire import (
    BEAT,
    LEASE,
    PROTOCOL,
    Ask,
    Beat,
    BrokenError,
    Cancel,
    Echo,
    Ended,
    Greet,
    Refused,
    Welcome,
    Whole,
    clock,
    pack,
    read_to_prefill,
)

logger = logging.getLogger("vllm.mooncake")

SCHEME = "mooncake-push://"
_GREET_LIMIT = 5.0
_SWEEP = 0.5
_GONE = (OSError, EOFError, BrokenError, asyncio.IncompleteReadError, TimeoutError)


class Server:
    """Listens until its loop is closed.  `address` is what the registry gives to decode."""

    def __init__(
        self, loop: LoopThread, pushes: Pushes, engine: str, ranks: Ranks, layers: Layers, heads: int, block_size: int
    ) -> None:
        self._loop, self._pushes, self._engine = loop, pushes, engine
        self._ranks, self._layers, self._heads, self._block_size = ranks, layers, heads, block_size
        self.address = ""
        self._secret = read_secret()
        self._anteroom = Anteroom()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str) -> None:
        """`host`: how this one is reached.  Raises OSError, ConfigError."""
        self.address = SCHEME + join_host(host, await serve_streams(self._connected, listen_address(host)))
        task = asyncio.create_task(self._sweep())
        self._tasks.add(task)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP)
            self._pushes.sweep()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            ticket = 0 if self._secret is None else self._anteroom.enter(writer.transport.abort)
            try:
                async with asyncio.timeout(_GREET_LIMIT):
                    greet = await first_message(reader, writer, self._secret)
            finally:
                self._anteroom.leave(ticket)
            if isinstance(greet, Greet):
                await self._serve(greet, reader, writer)
        except _GONE as error:
            logger.debug("A connection of decode ended: %r", error)
        except asyncio.CancelledError:
            pass  # the loop is closed: asyncio would log it as an error of a callback (Python 3.11)
        finally:
            writer.close()

    async def _serve(self, greet: Greet, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        refused, receiver = self._admit(greet, writer)
        if receiver is None:
            writer.write(pack(refused))
            await writer.drain()
            logger.warning("Decode's worker at %s is refused: %s", greet.session, refused.reason)
            return
        place = greet.ranks.tensor, greet.ranks.pipeline
        ranks = receivers(self._ranks.tensor, self._ranks.tensor_size, greet.ranks.tensor_size, self._heads)
        expected = {(tensor, pipeline) for tensor in ranks for pipeline in range(greet.ranks.pipeline_size)}
        writer.write(pack(Welcome()))
        beats = asyncio.create_task(self._beat(receiver, writer))
        try:
            while True:
                self._take(receiver, place, expected, await read_to_prefill(reader))
        finally:
            beats.cancel()
            self._pushes.lost(receiver)

    def _admit(self, greet: Greet, writer: asyncio.StreamWriter) -> tuple[Refused, Receiver | None]:
        if greet.engine != self._engine:
            return Refused(f"engine {greet.engine} is not here any more, but {self._engine}", restarted=True), None
        if greet.protocol != PROTOCOL or greet.block_size != self._block_size or greet.heads != self._heads:
            mine, theirs = (PROTOCOL, self._block_size, self._heads), (greet.protocol, greet.block_size, greet.heads)
            return Refused(f"(protocol, tokens of a block, KV heads) of prefill are {mine}, of decode {theirs}"), None
        try:
            route = make_route(self._layers, self._ranks, greet.layers, greet.ranks, self._heads)
        except ConfigError as error:
            return Refused(str(error)), None
        send = partial(self._loop.soon, _write, writer)
        return Refused(""), Receiver(greet.worker, greet.session, route, send)

    def _take(self, receiver: Receiver, place: Place, expected: set[Place], message: Any) -> None:
        match message:
            case Ask():
                self._pushes.ask(receiver, place, expected, message)
            case Cancel():
                self._pushes.cancel(receiver, message.number)
            case Echo():
                self._pushes.echoed(receiver, message.stamp)
            case _:
                raise BrokenError("it greeted twice")

    async def _beat(self, receiver: Receiver, writer: asyncio.StreamWriter) -> None:
        began = time.monotonic()
        while not writer.is_closing():
            writer.write(pack(Beat(clock())))
            await asyncio.sleep(BEAT)
            silent = min(clock() - receiver.stamp, time.monotonic() - began)
            if silent > 2 * LEASE:
                logger.warning("Decode's worker at %s is silent; its connection is closed", receiver.session)
                writer.transport.abort()
                return


def _write(writer: asyncio.StreamWriter, message: Ended | Whole) -> None:
    if not writer.is_closing():
        writer.write(pack(message))
