"""Wherever the leader is: the back end is asked when a connection is made, and not too often."""

import os
import threading
import time

from mooncake.config_text import without_password
from mooncake.election.addresses import open_election
from mooncake.election.base import LEASE_S, View
from mooncake.errors import MetadataError
from mooncake.rpc.place import MasterPlace, parse_address
from mooncake.transfer.metadata.limits import call_within

_FIND_S = 1.0  # seconds that a look may take
_FRESH_S = 0.5  # and what it found is good for


class LeaderPlace(MasterPlace):
    """Thread-safe."""

    wait_s = 2 * LEASE_S

    def __init__(self, text: str) -> None:
        self.text = without_password(text)
        self._text = text
        self._election = open_election(text)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._term = 0  # the highest one seen
        self._lower_since = 0.0
        self._view: View | None = None  # by the last look that succeeded
        self._problem = ""  # of the last look
        self._looked = 0.0

    def find(self) -> tuple[str, int]:
        with self._lock:
            if time.monotonic() - self._looked > _FRESH_S:
                self._look()
                self._looked = time.monotonic()
            if self._view is None:
                raise ConnectionRefusedError(self._problem)
            return parse_address(self._view.address)

    def accept(self, term: int) -> None:
        with self._lock:
            if term < self._term:
                raise ConnectionRefusedError(f"the master there has term {term}; one of term {self._term} is known")
            self._term = term

    def unreachable(self, error: Exception) -> str:
        return f"no leading master is reached by {self.text}: {getattr(error, 'strerror', None) or error}"

    def _look(self) -> None:
        if self._owner != os.getpid():  # a forked child must not use the connections of its parent
            self._owner, self._election = os.getpid(), open_election(self._text)
        try:
            view = call_within(_FIND_S, self._election.look)
            if view is not None:
                parse_address(view.address)
        except (MetadataError, TimeoutError, ValueError) as error:
            self._problem = str(error)  # whoever led may lead still
            return
        self._view = view
        if view is None:
            self._problem = "nobody leads now; is a mooncake_master with --enable_ha running for this cluster?"
        else:
            self._count(view.term)

    def _count(self, term: int) -> None:
        """A lower term than before, for long, is that of a back end that has lost its memory."""
        if term >= self._term:
            self._term, self._lower_since = term, 0.0
        elif not self._lower_since:
            self._lower_since = time.monotonic()
        elif time.monotonic() - self._lower_since > 2 * LEASE_S:
            self._term, self._lower_since = term, 0.0
