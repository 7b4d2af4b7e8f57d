"""One request to one instance, which ends with its answer, when its time is up, or when somebody says that it is lost.

While it lasts it counts as in flight there, and it is among the instance's dependents.
"""

import asyncio
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Self

import aiohttp

from mooncake.proxy.errors import Broken, PrefillLost, Refused, Unreached, UpstreamError
from mooncake.proxy.instances import Instance


class Call:
    """An async context manager; whatever goes wrong inside leaves it as an UpstreamError.

    Errors of the client's own connection must not be raised inside as aiohttp's.
    """

    def __init__(self, instance: Instance, limit_s: float, may_move: Callable[[], bool]) -> None:
        """`may_move`: whether the request could go on elsewhere, asked when the instance is out of reach."""
        self.instance = instance
        self._may_move = may_move
        self._loop = asyncio.get_running_loop()
        self.started = monotonic()
        self._allowed = limit_s
        self._limit = asyncio.timeout(limit_s)
        self._lost: UpstreamError | None = None
        self._prefill: Instance | None = None
        self._ended = False

    def progress(self, limit_s: float) -> None:
        """Something came: the next piece may take `limit_s`."""
        if self._lost is None:
            self._allowed = limit_s
            self._limit.reschedule(self._loop.time() + limit_s)

    def rely_on(self, prefill: Instance) -> None:
        """Until `no_longer_relies` this request waits for what a prefill instance sends."""
        self._prefill = prefill
        prefill.dependents.add(self)

    def no_longer_relies(self) -> None:
        if self._prefill is not None:
            self._prefill.dependents.discard(self)
            self._prefill = None

    def lose(self, instance: Instance, *, forced: bool = False) -> None:
        if instance is self._prefill:
            self.give_up(PrefillLost("the prefill instance is out of reach"))
        elif forced or self._may_move():
            self.give_up(Broken("the instance is out of reach"))

    def give_up(self, error: UpstreamError) -> None:
        """End the request from outside."""
        if self._lost is None and not self._ended and not self._limit.expired():
            self._lost = error
            self._limit.reschedule(self._loop.time())

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self.instance.in_flight += 1
        self.instance.dependents.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self.instance.in_flight -= 1
        self.instance.dependents.discard(self)
        self.no_longer_relies()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            raise self._lost or Broken(f"no sign of life for {self._allowed:g} s", 504) from None
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            raise self._lost or Unreached("no connection could be made in time") from None
        if isinstance(error, aiohttp.ClientConnectorError):
            raise self._lost or Refused("no connection could be made") from None
        if isinstance(error, aiohttp.ClientError):
            raise self._lost or Broken(f"the connection was lost ({type(error).__name__})") from None
