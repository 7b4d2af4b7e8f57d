"""What the callbacks of an RpcInterface are given, and how it lies on a stream.

    u32 magic | u32 length of head | head (msgpack of Head) | payload

A payload is answered with one i32: 0 taken, -1 not.
"""

import struct

import msgspec

MAGIC = 0x4D435250
PREFIX = struct.Struct("<II")
ANSWER = struct.Struct("<i")
LONGEST_HEAD = 1 << 16
LARGEST_PAYLOAD = 64 << 30  # bytes


class Head(msgspec.Struct, array_like=True):
    """`size` is the payload's bytes.  `dtype` is "" for data, torch's name for a tensor of `shape`."""

    size: int
    dtype: str = ""
    shape: list[int] = []


class ReceivedData:
    """Bytes that a peer has sent."""

    def __init__(self, source_address: str, payload: bytearray) -> None:
        self.source_address = source_address
        self._payload = payload

    @property
    def data_size(self) -> int:
        return len(self._payload)

    def get_bytes(self) -> bytes:
        """A copy."""
        return bytes(self._payload)

    def get_memory_view(self) -> memoryview:
        return memoryview(self._payload)


class ReceivedTensor:
    """A tensor that a peer has sent: its bytes in C order, `dtype` as torch names it ("float32")."""

    def __init__(self, source_address: str, head: Head, payload: bytearray) -> None:
        self.source_address = source_address
        self.shape = list(head.shape)
        self.dtype = head.dtype
        self._payload = payload

    @property
    def total_bytes(self) -> int:
        return len(self._payload)

    def get_data_size(self) -> int:
        return len(self._payload)

    def get_data_as_bytes(self) -> bytes:
        """A copy."""
        return bytes(self._payload)

    def get_memory_view(self) -> memoryview:
        return memoryview(self._payload)
