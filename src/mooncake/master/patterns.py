"""Patterns that clients send: RE2's, so that a search is linear in the key's length, and small, since the master stands
still while one is made: 500 characters may take 14 s where their memory is not bounded."""

from __future__ import annotations

from collections.abc import Callable

from mooncake.errors import ErrorCode, StoreError

LONGEST = 500  # characters
_MEMORY = 256 << 10  # bytes of what is made of one


def searcher(pattern: str) -> Callable[[str], object]:
    """What finds `pattern` in a key, or None.  Raises StoreError for what is none, or takes too much."""
    if len(pattern) > LONGEST:
        raise StoreError(
            ErrorCode.INVALID_PARAMS, f"a pattern has at most {LONGEST} characters, and this one {len(pattern)}"
        )
    import re2

    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY
    try:
        search: Callable[[str], object] = re2.compile(pattern, options).search
    except re2.error:
        raise StoreError(ErrorCode.INVALID_PARAMS, f"{pattern[:200]!r} is not a pattern of RE2, or too large") from None
    return search
