"""How a key says whose it is.

With tenants on, the directory knows every key (and group) by a longer one that starts with its tenant's *scope*.  No
request can name what lies under another scope: whoever connects says who he is, and all that he names gets his own.
"""

from __future__ import annotations

DEFAULT = "default"  # who says nothing
_MARK = "\x1f"  # no tenant's name holds it


def wrong_name(name: str) -> str:
    """Why `name` cannot be a tenant's, as "expected ..."; "" if it can."""
    if not name or name.startswith("_") or any(ord(char) < 32 or ord(char) == 127 for char in name):
        return 'expected text that is not empty, starts with no "_" and has no control characters'
    return ""


def scope_of(name: str) -> str:
    """What the keys of the tenant `name` start with."""
    return f"{_MARK}{name}{_MARK}"


def scope_in(key: str) -> str:
    """The scope that `key` starts with; "" if there is none."""
    return key[: key.find(_MARK, 1) + 1] if key.startswith(_MARK) else ""


def split(key: str) -> tuple[str, str]:
    """The tenant's name and the key as he knows it; the name is "" if the key has no scope."""
    scope = scope_in(key)
    return scope[1:-1], key[len(scope) :]
