"""Copies from this segment to others, at the master's word: read here, written over tcp to the other's server.

One thread does one after another, so that a drain does not take the link from those who read.
"""

import contextlib
import logging
import queue
import socket
import threading
from collections import deque

import msgspec

from mooncake.errors import ErrorCode, StoreError
from mooncake.rpc import frame
from mooncake.rpc.client import Connection
from mooncake.rpc.data_messages import Write, WriteRecord
from mooncake.rpc.messages import Codes, Hello
from mooncake.rpc.place import parse_address
from mooncake.rpc.record_messages import Body
from mooncake.rpc.sockets import connect, set_time_limit
from mooncake.rpc.task_messages import CopyEnded, CopyPart
from mooncake.transfer import table
from mooncake.transfer.memory import SegmentMemory
from mooncake.transfer.stream import TICK, tune

logger = logging.getLogger("mooncake.segment")

CONNECT_LIMIT = 2.0  # seconds
ANSWER_LIMIT = 10.0
_FAILED = (OSError, StoreError, ValueError, frame.FramingError, msgspec.MsgspecError)


class Copies:
    """The copies of one segment.  `finished`: what the master is to be told."""

    def __init__(self, memory: SegmentMemory, hello: Hello) -> None:
        self._memory = memory
        self._hello = hello
        self._wanted: queue.Queue[CopyPart] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._begun = 0
        self.finished: deque[CopyEnded] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._begun)

    def begin(self, message: CopyPart) -> None:
        """Copy as soon as those before it are done."""
        self._begun += 1
        self._wanted.put(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mooncake-copies", daemon=True)
            self._thread.start()

    def take_finished(self) -> CopyEnded | None:
        """The next one that has ended."""
        if not self.finished:
            return None
        self._begun -= 1
        return self.finished.popleft()

    def _run(self) -> None:
        while True:
            message = self._wanted.get()
            code = int(ErrorCode.TRANSFER_FAIL)
            try:
                code = self._copy(message)
            except _FAILED as error:
                logger.warning("a copy to segment %s failed: %s", message.target_name, error)
            except Exception:
                logger.exception("a copy to segment %s failed", message.target_name)
            self.finished.append(CopyEnded(message.copy_id, code))

    def _copy(self, message: CopyPart) -> int:
        view = self._memory.table.view(message.slot)
        if view is None or view.seq != message.seq or view.state != table.COMPLETE:
            return int(ErrorCode.REPLICA_IS_GONE)
        extents = view.body.extents
        if sum(extents[1::2]) != sum(message.extents[1::2]):
            return int(ErrorCode.INVALID_REPLICA)
        body = msgspec.structs.replace(
            view.body,
            extents=message.extents,
            replica=message.replica,
            part=message.part,
            parts=message.parts,
            version=message.version,
            from_disk=0,  # that is on another server's disk
        )
        return self._write(message, body, [(extents[i], extents[i + 1]) for i in range(0, len(extents), 2)])

    def _write(self, message: CopyPart, body: Body, ranges: list[tuple[int, int]]) -> int:
        sock = connect(*parse_address(message.tcp), CONNECT_LIMIT)
        with contextlib.closing(sock):
            tune(sock)
            set_time_limit(sock, ANSWER_LIMIT)
            stream = Connection(sock)
            stream.greet(self._hello)
            write = Write(message.target, message.term, [WriteRecord(message.slots, message.to_seq, body)])
            request = stream.send(write, b"")
            set_time_limit(sock, TICK)
            for offset, length in ranges:
                self._memory.send(sock, offset, length)
            set_time_limit(sock, ANSWER_LIMIT)
            answer = stream.reply_to(write, request)
            sock.shutdown(socket.SHUT_RDWR)
        return answer.codes[0] if isinstance(answer, Codes) and answer.codes else int(ErrorCode.TRANSFER_FAIL)
