"""Server-sent events as bytes.

A block that came from an engine is passed on at once if it ends where an event ends, which is the rule; else the
unfinished end waits for the next block.  So what a client has seen is always whole events, and a stream that breaks can
be continued or ended with an error event.  Nothing is parsed.
"""

import re

from mooncake.proxy.errors import Broken

DONE = b"data: [DONE]"
FAILED = b'data: {"error"'  # an engine's own report that it cannot go on (a quote inside a JSON text is escaped)
_ENDS = (b"\n\n", b"\r\n\r\n")
_LONGEST_EVENT = 64 << 20  # bytes

# Fields that only the proxy asked for.  In a JSON text the quote of `,"` would be escaped, so this matches only fields.
_TOKEN_IDS = re.compile(rb',\s?"(?:prompt_)?token_ids":\s?(?:null|\[[\d, ]*\])')


class Cutter:
    """Cuts a stream of blocks at the ends of events."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def cut(self, block: bytes) -> bytes:
        """Everything up to the last end of an event so far; may be empty."""
        if self._rest:
            block = self._rest + block
            self._rest = b""
        if block.endswith(_ENDS):
            return block
        end = max(place + len(mark) if (place := block.rfind(mark)) >= 0 else 0 for mark in _ENDS)
        self._rest = block[end:]
        if len(self._rest) > _LONGEST_EVENT:
            raise Broken("an event has no end")
        return block[:end]


def is_done(block: bytes) -> bool:
    """Whether whole events end with the stream's own end."""
    return block.rstrip().endswith(DONE)


def split_failure(block: bytes) -> tuple[bytes, bytes]:
    """The events before an engine's error event, and that event."""
    before, _, rest = block.partition(FAILED)
    return before, (FAILED + rest).splitlines()[0] + b"\n\n"


def without_token_ids(block: bytes) -> bytes:
    return _TOKEN_IDS.sub(b"", block)


def data_of(block: bytes) -> list[bytes]:
    """What each `data:` line of whole events carries."""
    return [line[5:].strip() for line in block.splitlines() if line.startswith(b"data:")]
