"""The drop-in surface of the transfer engine: `from mooncake.engine import TransferEngine`."""

from mooncake.installed_once import refuse_if_cpp_installed

refuse_if_cpp_installed()

from mooncake.engine.transfer_engine import TransferEngine  # noqa: E402
from mooncake.engine.types import InnerTransferEngine, TransferNotify, TransferOpcode  # noqa: E402

Read = TransferOpcode.Read
Write = TransferOpcode.Write

SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False

__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "InnerTransferEngine",
    "Read",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
]
