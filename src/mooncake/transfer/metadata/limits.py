"""A limit of time for what has none: looking a host's name up, a stopped service, one that answers byte by byte."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

THREAD = "mooncake-engine-metadata-call"
_Result = TypeVar("_Result")


def call_within(limit: float, call: Callable[[], _Result]) -> _Result:
    """What `call` gives, run in a thread of its own.  Raises TimeoutError after `limit` seconds: the thread is left to
    end by itself."""
    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # raised again where the call was made
            outcome.set_exception(error)

    threading.Thread(target=run, name=THREAD, daemon=True).start()
    try:
        return outcome.result(limit)
    except TimeoutError:
        if outcome.done():  # it is the call's own
            raise
        raise TimeoutError(f"no answer within {limit:.0f} s") from None
