"""A limit of time for what has none: looking a host's name up, a stopped service, one that answers byte by byte."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

THREAD = "mooncake-engine-metadata-call"
_Result = TypeVar("_Result")


def call_within(limit: float, call: Callable[[], _Result]) -> _Result:
    """What `call` gives, run in a thread of its own.  Raises TimeoutError after `limit` seconds: the thread is left to
    end by itself."""
    outcome: SimpleQueue[tuple[_Result | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:  # raised again where the call was made
            outcome.put((None, error))

    threading.Thread(target=run, name=THREAD, daemon=True).start()
    try:
        result, error = outcome.get(timeout=limit)
    except Empty:
        raise TimeoutError(f"no answer within {limit:.0f} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # None is a result like any other
