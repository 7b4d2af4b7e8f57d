"""A master's thread that stands for election, and renews what it has won.  It owns the back end's connections."""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from mooncake.election.base import POLL_S, RENEW_S, Election, Outcome, View
from mooncake.errors import MetadataError
from mooncake.master.reign import Reign, boot_clock
from mooncake.transfer.metadata.limits import call_within

log = logging.getLogger("mooncake.master")

_RETRY_S = 0.2
_RESIGN_S = 1.0
_Result = TypeVar("_Result")


class Candidate(threading.Thread):
    """Stands with `address` until elected or stopped.  `on_elected` is told of the reign, in this thread."""

    def __init__(self, election: Election, address: str, on_elected: Callable[[Reign], None]) -> None:
        super().__init__(name="mooncake-candidate", daemon=True)
        self._election = election
        self._address = address
        self._on_elected = on_elected
        self._stopping = threading.Event()
        self.leader: View | None = None  # who leads, by the last look
        self.problem = ""  # why that is not known

    def run(self) -> None:
        while not self._stopping.is_set():
            asked = boot_clock()
            outcome = self._stand()
            if outcome is not None:
                self.leader = outcome.view
                if outcome.won and outcome.view is not None:
                    reign = Reign(outcome.view, asked)
                    self._on_elected(reign)
                    self._renew(reign)
                    return
            self._stopping.wait(POLL_S)

    def resign(self, reign: Reign) -> None:
        """Let somebody else be elected at once, if the back end can be told soon."""
        self._stopping.set()
        self._ask(lambda: self._election.resign(reign.view, reign.least_term), _RESIGN_S)

    def stop(self) -> None:
        self._stopping.set()

    def _stand(self) -> Outcome | None:
        return self._ask(lambda: self._election.stand(self._address), self._election.limit)

    def _renew(self, reign: Reign) -> None:
        while not self._stopping.wait(RENEW_S if not self.problem else _RETRY_S):
            asked = boot_clock()
            limit = max(min(self._election.limit, reign.left_s), _RETRY_S)
            goes_on = self._ask(lambda: self._election.renew(reign.view), limit)
            if goes_on is False:
                reign.end("its entry in the back end is gone, or another's")
            elif goes_on:
                reign.renewed(asked)
            if not reign.holds():
                return

    def _ask(self, call: Callable[[], _Result], limit: float) -> _Result | None:
        """None if the back end does not answer, which is said when it begins and when it is over."""
        try:
            answer = call_within(limit, call)
        except (MetadataError, TimeoutError) as error:
            if not self.problem:
                log.warning("high availability: %s; trying again", error)
            self.problem = str(error)
            return None
        except Exception as error:
            log.exception("high availability: the back end could not be asked")
            self.problem = repr(error)
            return None
        if self.problem:
            log.info("high availability: the back end answers again")
        self.problem = ""
        return answer
