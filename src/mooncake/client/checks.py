"""Which values get a checksum when they are put, and which are looked at when they are read (MOONCAKE_STORE_CHECKSUM).

off      none (default)
tcp      those that are written over tcp get one; of those that are read over tcp it is compared
always   all get one, and it is always compared
"""

import os
from typing import NamedTuple

from mooncake.errors import ConfigError, ErrorCode

MODES = ("off", "tcp", "always")
MISMATCH = int(ErrorCode.CHECKSUM_MISMATCH)
_VARIABLE = "MOONCAKE_STORE_CHECKSUM"


def checksum_mode() -> str:
    """What the environment says.  Raises ConfigError."""
    mode = os.environ.get(_VARIABLE, "").strip().lower() or "off"
    if mode not in MODES:
        raise ConfigError(f"{_VARIABLE} is {mode!r}; expected one of {', '.join(MODES)}")
    return mode


class Checks:
    """`on`: at all."""

    def __init__(self, mode: str) -> None:
        self.on = mode != "off"
        self._always = mode == "always"

    def cover(self, transport: str) -> bool:
        """What goes by this transport."""
        return self._always or (self.on and transport == "tcp")


class Check(NamedTuple):
    """What the value of `key` is to be recognized by."""

    key: str
    checksum: int


class Damage:
    """What a batch of reads has found, to be told to the master."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.checksums: list[int] = []
        self.places: list[list[int]] = []

    def add(self, check: Check, place: list[int]) -> None:
        self.keys.append(check.key)
        self.checksums.append(check.checksum)
        self.places.append(place)
