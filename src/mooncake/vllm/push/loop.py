"""A thread with an event loop, for everything that workers say to each other."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")
_STOP_LIMIT = 5.0


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """From any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, action: Callable[..., object], *arguments: object) -> None:
        """From any thread; nothing once it is closed."""
        try:
            self._loop.call_soon_threadsafe(action, *arguments)
        except RuntimeError:
            pass

    def close(self) -> None:
        """Cancel whatever goes on, and end."""
        try:
            self.start(_cancel_all()).result(_STOP_LIMIT)
        except TimeoutError:
            pass
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_LIMIT)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
