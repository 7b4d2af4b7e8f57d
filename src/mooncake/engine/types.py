"""The small types of the drop-in surface (spec: drop-in behaviour 2)."""

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake.engine.transfer_engine import TransferEngine
    from mooncake.transfer.pieces import Pieces


class TransferOpcode(Enum):
    """Which way bytes go; converts with int(), as pybind11's enums do."""

    Read = 0
    Write = 1

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)


class InnerTransferEngine:
    """What `TransferEngine.get_engine` hands out; made by it alone."""

    def __init__(self, owner: "TransferEngine") -> None:
        self.owner = owner

    def covers(self, pieces: "Pieces", write: bool) -> bool:
        """Whether the engine has registered every piece, and it is mapped host memory (writable if `write`)."""
        engine = self.owner._engine
        return engine is not None and engine.regions.covers(pieces, write)

    def contains(self, pieces: "Pieces") -> bool:
        """Likewise, of memory of any kind."""
        engine = self.owner._engine
        return engine is not None and engine.regions.contains(pieces)


class TransferNotify:
    """What a peer is told once the bytes of a transfer are there."""

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name = name
        self.msg = msg

    def __repr__(self) -> str:
        return f"TransferNotify(name={self.name!r}, msg={self.msg!r})"
