"""How many bytes of requests' bodies there may be at a time: who finds no room waits, first come, first served."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NoRoomError(Exception):
    """None came within the limit: 503, with this text."""


class Room:
    """`size` bytes; of one event loop."""

    def __init__(self, size: int, patience: float) -> None:
        self._size = self._left = size
        self._patience = patience
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Hold so many bytes (at most all).  Raises NoRoomError after `patience` seconds."""
        size = min(size, self._size)
        await self._get(size)
        try:
            yield
        finally:
            self._give_back(size)

    async def _get(self, size: int) -> None:
        if not self._waiting and size <= self._left:
            self._left -= size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            async with asyncio.timeout(self._patience):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._give_back(size)
            else:
                self._waiting.remove((size, turn))
                self._wake()
            if isinstance(error, TimeoutError):
                raise NoRoomError("too many large bodies are being worked on; try again") from None
            raise

    def _give_back(self, size: int) -> None:
        self._left += size
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._left:
            size, turn = self._waiting.popleft()
            if not turn.done():
                self._left -= size
                turn.set_result(None)
