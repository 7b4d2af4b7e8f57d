"""How much one request may ask for."""

from __future__ import annotations

import struct

from mooncake.errors import ErrorCode, StoreError

MOST_KEYS = 1_000_000
LONG_BODY = MOST_KEYS  # bytes: one that is shorter has not that many keys

_ARRAY32 = 0xDD  # of msgpack
_COUNT = struct.Struct(">I").unpack_from


def check_count(count: int) -> None:
    """Raises StoreError for more keys than that."""
    if count > MOST_KEYS:
        raise StoreError(ErrorCode.INVALID_PARAMS, f"{count} keys in one request; at most {MOST_KEYS}")


def check_long(body: bytes) -> None:
    """Of a message, before it is decoded, which would hold up everybody for seconds: raises StoreError if its first
    field lists more than that."""
    if body[1] == _ARRAY32 and body[0] & 0xF0 == 0x90:  # (a short array, of which the first item is a long one)
        check_count(_COUNT(body, 2)[0])
