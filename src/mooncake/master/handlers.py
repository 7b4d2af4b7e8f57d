"""The handlers of the master's messages by kind, and what all of them share.

A handler gets the session and the message and returns the reply, nothing (one-way), or a coroutine for
the reply when the work is too long for one step of the loop or has to wait.  It checks all it was sent before it
changes anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from mooncake.master.puts import Put
from mooncake.rpc import messages as m
from mooncake.rpc.message import Message
from mooncake.rpc.messages import KINDS

if TYPE_CHECKING:
    from mooncake.master.service import Session

Reply = Message | Coroutine[Any, Any, Message | None] | None
Handler = Callable[["Session", Any], Reply]
T = TypeVar("T")

HANDLERS: dict[int, Handler] = {}


def handles(message: type[Message]) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS[KINDS[message]] = handler
        return handler

    return register


_PATIENT = frozenset(
    KINDS[kind] for kind in (m.Exist, m.Prefix, m.GetStart, m.Query, m.Remove, m.RemoveAll, m.RemoveRegex)
)


def must_wait_for(session: Session, kind: int, request: Message) -> list[Put]:
    """The eager puts that must end before `request`: their callers may have been told already that they have."""
    directory = session.service.directory
    if not directory.puts.eager or not (kind in _PATIENT or _overwrites(request)):
        return []
    return directory.puts.eager_met(getattr(request, "keys", None), directory.clock())


def _overwrites(request: Message) -> bool:
    return isinstance(request, m.PutStart) and request.options is not None and request.options.upsert


async def when_ended(session: Session, kind: int, request: Message, met: list[Put]) -> Message | None:
    """The reply once the eager puts that `request` met have ended; those that began since are not waited for (else
    steady puts would hold it up for ever)."""
    directory = session.service.directory
    for put in met:
        while directory.puts.still_eager(put, directory.clock()):
            await asyncio.sleep(0.0005)
    reply = HANDLERS[kind](session, request)
    return reply if reply is None or isinstance(reply, Message) else await reply


async def in_steps(steps: Generator[None, None, T], after: Callable[[], None]) -> T:
    """Run `steps` with the loop free between them, `after` each; what it returned."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            after()
            result: T = end.value
            return result
        after()
        await asyncio.sleep(0)
