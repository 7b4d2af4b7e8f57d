"""Framing: how one message lies on a stream.

    u32 length of body | u16 kind | u16 flags | u32 request id | body (msgpack of one message struct)

All little endian.  `kind` says which struct of `rpc.messages` the body is.  A reply carries its
request's id and kind with REPLY set; a refused request is answered with FAILED set and a
`messages.Failure` as body.  ONE_WAY messages have no reply and may travel in either direction.
"""

import struct
from typing import NamedTuple

HEADER = struct.Struct("<IHHI")
HEADER_SIZE = HEADER.size
MAX_BODY = 256 << 20

REQUEST = 0
REPLY = 1
ONE_WAY = 2
FAILED = 4

_FOREIGN = "the other side does not speak mooncake-py's protocol"


class Frame(NamedTuple):
    kind: int
    flags: int
    request_id: int
    body: bytes


class FramingError(Exception):
    """The stream does not speak this protocol; the connection must be closed."""


def pack(kind: int, flags: int, request_id: int, body: bytes) -> bytes:
    return HEADER.pack(len(body), kind, flags, request_id) + body


def check_first(data: bytes, kind: int) -> None:
    """Raise FramingError unless a stream that begins with `data` may begin with a message of `kind`: a foreign
    program's bytes would otherwise be waited on as the start of a long message."""
    if len(data) >= HEADER_SIZE:
        length, found, _, _ = HEADER.unpack_from(data)
        if found != kind and len(data) < HEADER_SIZE + length:
            raise FramingError(_FOREIGN)


class FrameReader:
    """Cuts a byte stream into frames; feed it what arrives.  `most`: bytes that a body may have."""

    __slots__ = ("_buffer", "most")

    def __init__(self, most: int = MAX_BODY) -> None:
        self._buffer = bytearray()
        self.most = most

    def feed(self, data: bytes) -> list[Frame]:
        """Frames completed by `data`, in order.  Raises FramingError on an impossible length."""
        buffer = self._buffer
        if not buffer and len(data) >= HEADER_SIZE:  # the usual case: exactly one whole frame
            length, kind, flags, request_id = HEADER.unpack_from(data)
            if len(data) == HEADER_SIZE + length:
                return [Frame(kind, flags, request_id, data[HEADER_SIZE:])]
        buffer += data
        frames = []
        at, end = 0, len(buffer)
        while end - at >= HEADER_SIZE:
            length, kind, flags, request_id = HEADER.unpack_from(buffer, at)
            if length > self.most:
                raise FramingError(_FOREIGN)
            body_at = at + HEADER_SIZE
            if end - body_at < length:
                break
            frames.append(Frame(kind, flags, request_id, bytes(buffer[body_at : body_at + length])))
            at = body_at + length
        if at:
            del buffer[:at]
        return frames
