"""The small types of the drop-in surface (spec: drop-in behaviour 2)."""

from enum import Enum


class TransferOpcode(Enum):
    """Which way bytes go; converts with int(), as pybind11's enums do."""

    Read = 0
    Write = 1

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)


class TransferNotify:
    """What a peer is told once the bytes of a transfer are there."""

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name = name
        self.msg = msg

    def __repr__(self) -> str:
        return f"TransferNotify(name={self.name!r}, msg={self.msg!r})"
