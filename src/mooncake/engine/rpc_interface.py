"""RpcInterface: bytes and tensors from process to process, with callbacks where they arrive (drop-in behaviour 2).

A side channel for small things and convenience: what is large and in place already goes by TransferEngine.  Both ends
must be of this package.
"""

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake.engine.received import ANSWER, LARGEST_PAYLOAD, MAGIC, PREFIX, Head, ReceivedData, ReceivedTensor
from mooncake.errors import ConfigError

if TYPE_CHECKING:
    from mooncake.engine.rpc_server import RpcServer

logger = logging.getLogger("mooncake.engine")

OK, FAILED = 0, -1
CONNECT_LIMIT = 5.0  # seconds


class _Callbacks:
    """Apart from the RpcInterface, so that its server does not keep it alive."""

    def __init__(self) -> None:
        self.data: Callable[[ReceivedData], object] | None = None
        self.tensor: Callable[[ReceivedTensor], object] | None = None

    def deliver(self, received: ReceivedData | ReceivedTensor) -> bool:
        """Whether a callback took it."""
        callback: Callable[[Any], object] | None = self.tensor if isinstance(received, ReceivedTensor) else self.data
        if callback is None:
            return False
        try:
            callback(received)
        except Exception:
            logger.exception("RpcInterface: the callback for a message of %s failed", received.source_address)
            return False
        return True


class RpcInterface:
    """Thread-safe.  A client, a server, or both."""

    def __init__(self) -> None:
        self._limit = 30.0
        self._pool_size = 0  # idle connections to keep; 0: no client
        self._listen: tuple[tuple[str, int], int] | None = None  # address, threads
        self._idle: dict[str, list[socket.socket]] = {}
        self._lock = threading.Lock()
        self._server: RpcServer | None = None
        self._callbacks = _Callbacks()
        self._executor: ThreadPoolExecutor | None = None

    # -- set-up

    def initialize(
        self, listen_address: str = "", thread_count: int = 0, timeout_seconds: int = 30, pool_size: int = 100
    ) -> bool:
        """A client, and a server too if there is an address ("host:port") to listen on."""
        if not self.initialize_client(pool_size, timeout_seconds):
            return False
        return not listen_address or self.initialize_server(listen_address, thread_count or 8, timeout_seconds)

    def initialize_client(self, pool_size: int = 100, timeout_seconds: int = 30) -> bool:
        if pool_size <= 0 or timeout_seconds <= 0:
            logger.error("RpcInterface: pool_size and timeout_seconds must be above 0")
            return False
        self._pool_size, self._limit = pool_size, float(timeout_seconds)
        return True

    def initialize_server(self, listen_address: str, thread_count: int = 8, timeout_seconds: int = 30) -> bool:
        """`thread_count`: callbacks that may run at once."""
        from mooncake.transfer.listening import split_host

        host, colon, port = listen_address.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535 or thread_count <= 0 or timeout_seconds <= 0:
            logger.error(
                "RpcInterface: cannot listen on %r with %d threads and a limit of %d s; expected host:port and numbers "
                "above 0",
                listen_address,
                thread_count,
                timeout_seconds,
            )
            return False
        self._listen = ((split_host(listen_address)[0] if host else "", int(port)), thread_count)
        self._limit = float(timeout_seconds)
        return True

    def set_data_receive_callback(self, callback: Callable[[ReceivedData], object], /) -> None:
        """`callback` runs for every send_data that reaches us, in a thread of ours; its sender waits for its end."""
        self._callbacks.data = callback

    def set_tensor_receive_callback(self, callback: Callable[[ReceivedTensor], object], /) -> None:
        """Likewise for send_tensor."""
        self._callbacks.tensor = callback

    def start_server(self) -> bool:
        """Serve until stop_server, which is called elsewhere.  False if the address cannot be had."""
        if not self.start_server_async():
            return False
        server = self._server
        if server is not None:
            server.wait()
        return True

    def start_server_async(self) -> bool:
        """Serve in the background."""
        from mooncake.engine.rpc_server import RpcServer

        with self._lock:
            if self._listen is None or self._server is not None:
                reason = "it serves already" if self._server else "initialize_server comes first"
                logger.error("RpcInterface: %s", reason)
                return False
            address, threads = self._listen
            try:
                self._server = RpcServer(address, threads, self._limit, self._callbacks.deliver)
            except OSError as error:
                logger.error("RpcInterface: cannot listen on %s:%d (%s)", *address, error.strerror or error)
                return False
            except ConfigError as error:
                logger.error("RpcInterface: %s", error)
                return False
        return True

    def stop_server(self) -> None:
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.stop()

    # -- sending

    def send_data(self, target_address: str, data: Any) -> int:
        """Send bytes; 0 once the target's callback has ended, else -1 and why is in the log."""
        try:
            payload = memoryview(data.encode() if isinstance(data, str) else data).cast("B")
        except TypeError:
            raise TypeError(f"send_data takes bytes or a buffer, but found {type(data).__name__}") from None
        return self._send(target_address, Head(payload.nbytes), payload)

    def send_tensor(self, target_address: str, tensor: Any) -> int:
        """Send a tensor of torch (of any device) or an array of numpy, by value.  0 or -1."""
        head, payload = _flat(tensor)
        return self._send(target_address, head, payload)

    def send_data_async(self, target_address: str, data: Any, loop: asyncio.AbstractEventLoop) -> "asyncio.Future[int]":
        """As send_data, for a coroutine of `loop` to await."""
        return self._soon(loop, lambda: self.send_data(target_address, data))

    def send_tensor_async(
        self, target_address: str, tensor: Any, loop: asyncio.AbstractEventLoop
    ) -> "asyncio.Future[int]":
        """As send_tensor, for a coroutine of `loop` to await."""
        return self._soon(loop, lambda: self.send_tensor(target_address, tensor))

    # -- inside

    def _soon(self, loop: asyncio.AbstractEventLoop, send: Callable[[], int]) -> "asyncio.Future[int]":
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(8, "mooncake-rpc-send")
        return asyncio.wrap_future(self._executor.submit(send), loop=loop)

    def _send(self, target: str, head: Head, payload: memoryview) -> int:
        if not self._pool_size:
            logger.error("RpcInterface: initialize_client comes first")
            return FAILED
        if head.size > LARGEST_PAYLOAD:
            logger.error("RpcInterface: %d bytes are more than %d", head.size, LARGEST_PAYLOAD)
            return FAILED
        encoded = msgspec.msgpack.encode(head)
        try:
            stream = self._borrow(target)
        except (OSError, ValueError) as error:
            logger.error("RpcInterface: %s cannot be reached: %s", target, error)
            return FAILED
        try:
            stream.sendall(PREFIX.pack(MAGIC, len(encoded)) + encoded)
            stream.sendall(payload)
            answer = stream.recv(ANSWER.size, socket.MSG_WAITALL)
            if len(answer) < ANSWER.size:
                raise ConnectionResetError("it closed the connection")
        except OSError as error:
            stream.close()
            logger.error("RpcInterface: sending to %s failed: %s", target, error)
            return FAILED
        self._give_back(target, stream)
        code: int = ANSWER.unpack(answer)[0]
        return code

    def _borrow(self, target: str) -> socket.socket:
        """An idle connection that is still good, or a new one.  Raises OSError, ValueError."""
        from mooncake.errors import StoreError
        from mooncake.rpc.client import Connection
        from mooncake.rpc.messages import PROTOCOL, Hello
        from mooncake.rpc.place import parse_address
        from mooncake.rpc.sockets import connect, is_quiet
        from mooncake.security.secret import read_secret
        from mooncake.version import __version__

        while True:
            with self._lock:
                idle = self._idle.get(target)
                if not idle:
                    break
                stream = idle.pop()
            if is_quiet(stream):
                return stream
            stream.close()
        stream = connect(*parse_address(target), min(CONNECT_LIMIT, self._limit))
        stream.settimeout(self._limit)
        if read_secret() is not None:
            try:
                Connection(stream).greet(Hello(PROTOCOL, __version__, "client", "", ""))
            except (StoreError, OSError) as error:
                stream.close()
                raise OSError(str(error)) from None
        return stream

    def _give_back(self, target: str, stream: socket.socket) -> None:
        with self._lock:
            if sum(map(len, self._idle.values())) < self._pool_size:
                self._idle.setdefault(target, []).append(stream)
                return
        stream.close()

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        with contextlib.suppress(Exception):
            self.stop_server()
            for idle in self._idle.values():
                for stream in idle:
                    stream.close()
            if self._executor is not None:
                self._executor.shutdown(wait=False)


CoroRPCInterface = RpcInterface


def create_rpc_client(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """A client that is ready to send.  The ranks are for the caller's own use."""
    made = RpcInterface()
    made.initialize_client()
    return made


def create_rpc_server(local_rank: int = 0, world_size: int = 1) -> RpcInterface:
    """One to be told where to listen: initialize_server, the callbacks, then start_server or start_server_async."""
    return RpcInterface()


def _flat(tensor: Any) -> tuple[Head, memoryview]:
    """Head and bytes (C order) of a torch tensor or a numpy array.  Raises TypeError."""
    if hasattr(tensor, "detach") and hasattr(tensor, "cpu"):  # torch's, without importing it
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        array = flat.view(_bytes_of(tensor)).numpy()
    elif hasattr(tensor, "__array_interface__"):
        import numpy as np

        array = np.ascontiguousarray(tensor)
        dtype, shape = array.dtype.name, list(tensor.shape)
    else:
        raise TypeError(f"send_tensor takes a torch tensor or a numpy array, but found {type(tensor).__name__}")
    if not array.nbytes:
        return Head(0, dtype, shape), memoryview(b"")
    payload = memoryview(array.reshape(-1).view("u1"))
    return Head(payload.nbytes, dtype, shape), payload


def _bytes_of(tensor: Any) -> Any:
    """torch.uint8, of the library that the tensor comes from."""
    import sys

    return sys.modules["torch"].uint8
