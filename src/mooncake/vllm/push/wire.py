"""What workers of prefill and decode tell each other, over one connection for each pair of them.

    decode → prefill    Knock     (with a cluster's secret) a nonce               answered: Challenge or Refused
                        Prove     the answer to the challenge
                        Greet     who I am and where my blocks are               answered: Welcome or Refused
                        Ask       push this prompt's blocks to these of mine     answered: Ended, once
                        Cancel    stop it                                        (the Ask's Ended says that it has)
                        Echo      your Beat has come
    prefill → decode    Beat      every BEAT seconds
                        Whole     the first of the blocks are there

An `Ask` may come before prefill has heard of its request.  It may come again over another connection, with the same
number: then it goes on, or its Ended is said again.

*The lease.*  Prefill begins no copy later than LEASE after the newest Beat of its own that decode has echoed.  So a
process that was stopped, and finds old echoes when it is resumed, writes nothing until decode has spoken to it again;
and decode, which echoes nothing any more once it has given a peer up, knows when its memory is its own.
"""

import asyncio
import time

import msgspec

from mooncake.vllm.push.geometry import Layers
from mooncake.vllm.push.routes import Ranks

PROTOCOL = 2
BEAT = 1.0  # seconds
LEASE = 5.0  # seconds
SILENCE = 5.0  # seconds without a word from prefill after which decode gives it up
_MOST_BYTES = 64 << 20


class Knock(msgspec.Struct, tag=True, array_like=True):
    nonce: bytes


class Challenge(msgspec.Struct, tag=True, array_like=True):
    nonce: bytes
    proof: bytes


class Prove(msgspec.Struct, tag=True, array_like=True):
    proof: bytes


class Greet(msgspec.Struct, tag=True, array_like=True):
    """`engine`: the engine that is meant, by its id.  `worker`: this worker's own name, the same as long as it lives.
    `session`: of its transfer engine.  `heads`: KV heads of the whole model."""

    protocol: int
    engine: str
    worker: str
    session: str
    ranks: Ranks
    heads: int
    block_size: int
    layers: Layers


class Welcome(msgspec.Struct, tag=True, array_like=True):
    pass


class Refused(msgspec.Struct, tag=True, array_like=True):
    """`restarted`: another engine is here now."""

    reason: str
    restarted: bool = False


class Ask(msgspec.Struct, tag=True, array_like=True):
    """`number`: the worker's own for it.  `blocks` (int64, in bytes): where block `first` of the prompt and those after
    it shall go; none: nothing is wanted, let go.  `tokens`, `digest`: the prompt's length and a sum of it."""

    number: int
    transfer: str
    first: int
    blocks: bytes
    tokens: int
    digest: int


class Cancel(msgspec.Struct, tag=True, array_like=True):
    number: int


class Ended(msgspec.Struct, tag=True, array_like=True):
    """Nothing is written for this Ask any more.  `reason`: "" if all its blocks are there."""

    number: int
    reason: str


class Whole(msgspec.Struct, tag=True, array_like=True):
    """The first `blocks` of those that an Ask named are there, and stay as they are if prefill is lost now."""

    number: int
    blocks: int


class Beat(msgspec.Struct, tag=True, array_like=True):
    """`stamp`: the sender's clock."""

    stamp: float


class Echo(msgspec.Struct, tag=True, array_like=True):
    stamp: float


ToPrefill = Knock | Prove | Greet | Ask | Cancel | Echo
ToDecode = Challenge | Welcome | Refused | Ended | Whole | Beat

_encoder = msgspec.msgpack.Encoder()
_to_prefill = msgspec.msgpack.Decoder(ToPrefill)
_to_decode = msgspec.msgpack.Decoder(ToDecode)


class BrokenError(Exception):
    """What came is no message."""


def clock() -> float:
    """Seconds, on a clock that runs while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def pack(message: ToPrefill | ToDecode) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


async def read_to_prefill(reader: asyncio.StreamReader, most: int = _MOST_BYTES) -> ToPrefill:
    """A message of at most `most` bytes.  Raises BrokenError, OSError, asyncio.IncompleteReadError."""
    body = await _body(reader, most)
    try:
        return _to_prefill.decode(body)
    except msgspec.MsgspecError as error:
        raise BrokenError(str(error)) from None


async def read_to_decode(reader: asyncio.StreamReader) -> ToDecode:
    """As `read_to_prefill`."""
    body = await _body(reader, _MOST_BYTES)
    try:
        return _to_decode.decode(body)
    except msgspec.MsgspecError as error:
        raise BrokenError(str(error)) from None


async def _body(reader: asyncio.StreamReader, most: int) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "little")
    if length > most:
        raise BrokenError(f"{length} bytes are no message")
    return await reader.readexactly(length)
