"""Decode's side of a connection to one worker of prefill: Asks that end, whatever becomes of the other side.

A broken connection is opened again, and what has not ended is asked for again.  An `Outcome` says how an Ask ended and
from when on nothing is written for it any more.
"""

import asyncio
import logging
from typing import NamedTuple

from mooncake.transfer.listening import split_host
from mooncake.vllm.push.proofs import prove
from mooncake.vllm.push.serving import SCHEME
from mooncake.vllm.push.tls import open_stream
from mooncake.vllm.push.wire import (
    LEASE,
    SILENCE,
    Ask,
    Beat,
    BrokenError,
    Cancel,
    Echo,
    Ended,
    Greet,
    Refused,
    ToDecode,
    Welcome,
    Whole,
    clock,
    pack,
    read_to_decode,
)

logger = logging.getLogger("vllm.mooncake")

_CONNECT_LIMIT = 3.0  # seconds
_PAUSE = 0.1  # seconds before a broken connection is opened again
_MARGIN = 0.5  # seconds that a copy, begun at the end of a lease, may take
_GONE = (OSError, EOFError, BrokenError, asyncio.IncompleteReadError)


class Outcome(NamedTuple):
    """`reason`: "" if all blocks are there, else the first `whole` of them are.  `told`: prefill has said so itself;
    else nothing is written any more from `until` on, by `wire.clock`, but for what is under way already."""

    reason: str
    whole: int = 0
    told: bool = True
    until: float = 0.0


class _RefusedError(Exception):
    """It is there, and wants nothing of us."""


class _Waiting:
    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.cancelled = False
        self.whole = 0
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()


class Link:
    """To one worker of one engine; of one event loop.  `closed` for good once it cannot be reached any more."""

    def __init__(self, address: str, greet: Greet) -> None:
        self.closed = False
        self._address, self._greet = address, greet
        self._waiting: dict[int, _Waiting] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._echoed: float | None = None  # when, if ever: it may write only after that
        self._task = asyncio.create_task(self._run())

    def ask(self, ask: Ask) -> "asyncio.Future[Outcome]":
        waiting = self._waiting[ask.number] = _Waiting(ask)
        self._send(ask)
        return waiting.outcome

    def cancel(self, number: int) -> None:
        """Its outcome will say when that has been done."""
        waiting = self._waiting.get(number)
        if waiting is not None:
            waiting.cancelled = True
            self._send(Cancel(number))

    # -- inside

    def _send(self, message: Ask | Cancel) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(message))

    async def _run(self) -> None:
        reason, dead = "the connection to prefill was closed", False
        try:
            while True:
                reader, writer = await self._connect()
                try:
                    await self._serve(reader, writer)
                except TimeoutError:
                    reason = f"prefill said nothing for {SILENCE:g} s"
                    return
                except _GONE as error:
                    reason = f"the connection to prefill broke ({error!r})"
                finally:
                    self._writer = None
                    writer.close()
                if not self._waiting:
                    dead = True
                    return
                await asyncio.sleep(_PAUSE)
        except (_RefusedError, ConnectionRefusedError) as error:
            reason, dead = str(error), True
        except (TimeoutError, *_GONE) as error:
            reason = f"prefill's worker at {self._address} cannot be reached ({error!r})"
        finally:
            self._end_all(reason, dead)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = split_host(self._address.removeprefix(SCHEME))
        async with asyncio.timeout(_CONNECT_LIMIT):
            reader, writer = await open_stream(host, port)
            try:
                answer: ToDecode | None = await prove(reader, writer)
                if answer is None:
                    writer.write(pack(self._greet))
                    answer = await read_to_decode(reader)
            except BaseException:
                writer.close()
                raise
        if isinstance(answer, Welcome):
            return reader, writer
        writer.close()
        if isinstance(answer, Refused):
            raise _RefusedError(answer.reason)
        raise BrokenError("it did not answer the greeting")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        for waiting in self._waiting.values():
            self._send(waiting.ask)
            if waiting.cancelled:
                self._send(Cancel(waiting.ask.number))
        while True:
            async with asyncio.timeout(SILENCE):
                message = await read_to_decode(reader)
            if isinstance(message, Beat):
                self._echoed = clock()
                writer.write(pack(Echo(message.stamp)))
            elif isinstance(message, Whole) and message.number in self._waiting:
                self._waiting[message.number].whole = message.blocks
            elif isinstance(message, Ended) and message.number in self._waiting:
                ended = self._waiting.pop(message.number)
                if not ended.outcome.done():
                    ended.outcome.set_result(Outcome(message.reason, ended.whole))

    def _end_all(self, reason: str, dead: bool) -> None:
        self.closed = True
        until = 0.0 if dead or self._echoed is None else self._echoed + LEASE + _MARGIN
        for waiting in self._waiting.values():
            if not waiting.outcome.done():
                waiting.outcome.set_result(Outcome(reason, waiting.whole, False, until))
        self._waiting.clear()
