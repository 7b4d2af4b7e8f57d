"""A value whose parts lie in several segments, brought together in staging memory so that one disk takes it whole.

Nobody holds the other parts meanwhile: bytes are copied first, and believed only if every record is still what it was
when it is asked afterwards.  A record is called dead before its room goes to another value, under whatever master; so
what stands after the copy was not overwritten before."""

import contextlib
import ctypes
import socket
import time
from collections.abc import Iterator

import msgspec

from mooncake.errors import ErrorCode, TransferError
from mooncake.rpc.client import Connection
from mooncake.rpc.data_messages import Read, Standing
from mooncake.rpc.disk_messages import Gather, Piece
from mooncake.rpc.message import Message
from mooncake.rpc.messages import Hello
from mooncake.rpc.place import parse_address
from mooncake.rpc.sockets import connect, set_time_limit
from mooncake.segment.disk.packing import Value
from mooncake.segment.disk.staging import Staging
from mooncake.segment.owner import Owner
from mooncake.transfer import table
from mooncake.transfer.stream import TICK, receive, tune
from mooncake.transfer.stream_pool import receive_codes, send_message

_WAIT = 2.0  # seconds for room to gather in
_CONNECT_LIMIT = 2.0
_FETCH_LIMIT = 60.0


@contextlib.contextmanager
def gathered(order: Gather, owner: Owner, staging: Staging, hello: Hello, term: int) -> Iterator[Value]:
    """The whole value, in staging memory as long as the context lasts.  Raises TransferError if it is not there to be
    had, or no room for it; OSError, EOFError, StoreError as its other servers fail."""
    mine = next((piece for piece in order.pieces if piece.segment == owner.segment), None)
    view = None if mine is None else owner.memory.table.view(mine.slot)
    size = sum(sum(piece.extents[1::2]) for piece in order.pieces)
    if mine is None or view is None or view.seq != order.seq or view.body.size != size:
        raise TransferError("its record is not there any more")
    ticket = staging.take(size, _WAIT)
    if ticket is None:
        raise TransferError("there is no room in the staging memory for it")
    try:
        at = ticket.offset
        for piece in order.pieces:
            length = sum(piece.extents[1::2])
            if piece.segment == owner.segment:
                _copy(owner, piece, order.seq, term, at)
            else:
                _fetch(owner, piece, order.seq, term, at, hello)
            at += length
        body = msgspec.structs.replace(view.body, extents=[ticket.offset, size], part=0, parts=1)
        yield Value(mine.slot, order.seq, body)
    finally:
        staging.give_back([ticket.number])


def _copy(owner: Owner, piece: Piece, seq: int, term: int, at: int) -> None:
    memory = owner.memory
    for offset, length in _ranges(piece):
        ctypes.memmove(memory.address + at, memory.address + offset, length)
        at += length
    table.fence()
    if any(owner.standing(Standing(owner.segment, term, [piece.slot], seq))):
        raise TransferError("it was removed meanwhile")


def _fetch(owner: Owner, piece: Piece, seq: int, term: int, at: int, hello: Hello) -> None:
    sock = connect(*parse_address(piece.tcp), _CONNECT_LIMIT)
    with contextlib.closing(sock):
        tune(sock)
        set_time_limit(sock, TICK)
        Connection(sock).greet(hello)
        _ask(sock, Read(piece.segment, piece.extents, 0, 0))
        length = sum(piece.extents[1::2])
        receive(sock, owner.memory.data[at : at + length], time.monotonic() + _FETCH_LIMIT)
        _ask(sock, Standing(piece.segment, term, [piece.slot], seq))


def _ask(sock: socket.socket, message: Message) -> None:
    send_message(sock, message)
    code = receive_codes(sock).codes[0]
    if code:
        raise TransferError(f"a part of it cannot be had ({ErrorCode(code).name})")


def _ranges(piece: Piece) -> Iterator[tuple[int, int]]:
    return zip(piece.extents[::2], piece.extents[1::2], strict=True)
