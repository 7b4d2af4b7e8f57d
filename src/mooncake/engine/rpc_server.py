"""The receiving half of an RpcInterface: a port, a thread a connection, callbacks a few at a time."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

import msgspec

from mooncake.engine.received import (
    ANSWER,
    LARGEST_PAYLOAD,
    LONGEST_HEAD,
    MAGIC,
    PREFIX,
    Head,
    ReceivedData,
    ReceivedTensor,
)
from mooncake.rpc.messages import PROTOCOL, Welcome
from mooncake.rpc.porter import porter_for
from mooncake.security.secret import read_secret
from mooncake.security.tls_files import check_files
from mooncake.transfer.listening import join_host
from mooncake.transfer.stream import receive_new
from mooncake.version import __version__

logger = logging.getLogger("mooncake.engine")

MOST_CONNECTIONS = 1024
_DECODE = msgspec.msgpack.Decoder(Head).decode


class RpcServer:
    """`deliver` is called with everything that comes, by at most `threads` threads at once; whether it took it is the
    answer.  `limit`: seconds that a message may stand still."""

    def __init__(
        self,
        address: tuple[str, int],
        threads: int,
        limit: float,
        deliver: Callable[[ReceivedData | ReceivedTensor], bool],
    ) -> None:
        """Listen.  Raises OSError, ConfigError."""
        secret = read_secret()
        check_files()
        host, port = address
        family, *_, where = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._listener = socket.create_server(where[:2], family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._limit = limit
        self._deliver = deliver
        self._turn = threading.BoundedSemaphore(threads)
        self._open = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._streams: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._porter = porter_for(secret, _welcome, self._start, self._open.release)
        threading.Thread(target=self._accept, name="mooncake-rpc-accept", daemon=True).start()

    def wait(self) -> None:
        """Until `stop`."""
        self._stopped.wait()

    def stop(self) -> None:
        """End the port and every connection; a callback that runs goes on."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._porter is not None:
            self._porter.stop()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._stopped.is_set():
            self._open.acquire()
            try:
                stream, _ = self._listener.accept()
            except OSError as error:
                self._open.release()
                if not self._stopped.wait(0.1):
                    logger.warning("RpcInterface: cannot take a connection now: %s", error)
                continue
            if self._porter is None:
                self._start(stream)
            else:
                self._porter.take(stream)

    def _start(self, stream: socket.socket) -> None:
        try:
            peer = stream.getpeername()
        except OSError:  # it has gone already
            stream.close()
            self._open.release()
            return
        with self._lock:
            self._streams.add(stream)
        source = join_host(peer[0], peer[1])
        try:
            threading.Thread(target=self._serve, args=(stream, source), name="mooncake-rpc", daemon=True).start()
        except RuntimeError as error:
            logger.warning("RpcInterface: no thread for a connection: %s", error)
            self._let_go(stream)

    def _serve(self, stream: socket.socket, source: str) -> None:
        try:
            while not self._stopped.is_set():
                stream.settimeout(None)  # the next message may be long in coming
                received = self._receive(stream, source)
                with self._turn:
                    taken = self._deliver(received)
                stream.sendall(ANSWER.pack(0 if taken else -1))
        except (OSError, EOFError, ValueError, MemoryError) as error:  # msgspec's errors are ValueErrors
            if not isinstance(error, EOFError) and not self._stopped.is_set():
                logger.warning("RpcInterface: the connection of %s ended: %s", source, error)
        finally:
            self._let_go(stream)

    def _let_go(self, stream: socket.socket) -> None:
        with self._lock:
            self._streams.discard(stream)
        stream.close()
        self._open.release()

    def _receive(self, stream: socket.socket, source: str) -> ReceivedData | ReceivedTensor:
        magic, length = PREFIX.unpack(receive_new(stream, PREFIX.size))
        if magic != MAGIC or length > LONGEST_HEAD:
            raise ValueError("it does not speak this protocol")
        stream.settimeout(self._limit)
        head = _DECODE(receive_new(stream, length))
        if not 0 <= head.size <= LARGEST_PAYLOAD:
            raise ValueError(f"a payload of {head.size} bytes")
        payload = receive_new(stream, head.size)
        return ReceivedTensor(source, head, payload) if head.dtype else ReceivedData(source, payload)


def _welcome() -> Welcome:
    return Welcome(PROTOCOL, __version__, 0, 0)
