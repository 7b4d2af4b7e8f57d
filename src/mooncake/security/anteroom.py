"""Connections that have not proved themselves yet: a bounded number of them, for a bounded time.

When there are too many the one that has waited longest is closed: who knows the secret is through in milliseconds, so
strangers push out each other.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

MOST = 256
LIMIT = 5.0  # seconds


class Anteroom:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._waiting: OrderedDict[int, Callable[[], object]] = OrderedDict()
        self._tickets = count(1)
        self._lock = threading.Lock()

    def enter(self, close: Callable[[], object]) -> int:
        """A ticket; `close` is called if others need the place."""
        pushed_out = None
        with self._lock:
            ticket = next(self._tickets)
            self._waiting[ticket] = close
            if len(self._waiting) > self._most:
                _, pushed_out = self._waiting.popitem(last=False)
        if pushed_out is not None:
            pushed_out()
        return ticket

    def leave(self, ticket: int) -> None:
        """It has proved itself, or is closed."""
        with self._lock:
            self._waiting.pop(ticket, None)
