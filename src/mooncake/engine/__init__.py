"""The drop-in surface of the transfer engine: `from mooncake.engine import TransferEngine`."""

from mooncake.installed_once import refuse_if_cpp_installed

refuse_if_cpp_installed()

from typing import TYPE_CHECKING  # noqa: E402

from mooncake.engine.transfer_engine import TransferEngine  # noqa: E402
from mooncake.engine.types import InnerTransferEngine, TransferNotify, TransferOpcode  # noqa: E402

Read = TransferOpcode.Read
Write = TransferOpcode.Write

if TYPE_CHECKING:
    from mooncake.engine.received import ReceivedData, ReceivedTensor
    from mooncake.engine.rpc_interface import CoroRPCInterface, RpcInterface, create_rpc_client, create_rpc_server
    from mooncake.engine.shared_segment import SharedSegment

# What few programs use is imported when it is asked for, so that the engine starts fast.
_LATER = {
    "CoroRPCInterface": "rpc_interface",
    "ReceivedData": "received",
    "ReceivedTensor": "received",
    "RpcInterface": "rpc_interface",
    "SharedSegment": "shared_segment",
    "create_rpc_client": "rpc_interface",
    "create_rpc_server": "rpc_interface",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


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
    "CoroRPCInterface",
    "InnerTransferEngine",
    "Read",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SharedSegment",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
    "create_rpc_client",
    "create_rpc_server",
]
