"""Blocking tcp sockets as this package uses them."""

import ctypes
import select
import socket
import struct
from typing import TYPE_CHECKING, TypeGuard

from mooncake.security.tls_files import speaks_tls

if TYPE_CHECKING:
    from mooncake.rpc.tls_socket import TlsSocket


def set_time_limit(sock: socket.socket, seconds: float) -> None:
    """Kernel-side limits on a blocking socket: cheaper than Python's, which poll before each call."""
    if is_tls(sock):
        sock.settimeout(seconds)  # (its library would go on waiting)
        return
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def connect(host: str, port: int, limit: float) -> socket.socket:
    """A blocking tcp connection without delays of small messages, speaking TLS if this process is told to.

    Raises OSError."""
    sock = socket.create_connection((host, port), timeout=limit)
    if speaks_tls():
        from mooncake.rpc.tls_socket import wrap_client

        sock = wrap_client(sock, host)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def notice_lost_hosts(sock: socket.socket) -> None:
    """Have the kernel close a connection to a host that has been silent for 20 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 8)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)


def is_tls(sock: socket.socket) -> "TypeGuard[TlsSocket]":
    """Whether what is sent there passes through a library of this process, not only through the kernel."""
    return hasattr(sock, "pending")


def is_quiet(sock: socket.socket) -> bool:
    """Whether an idle stream can be used: nothing has come, not even its end."""
    if sock.fileno() < 0 or (is_tls(sock) and sock.pending()):
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(0)


_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: calls keep the interpreter lock
_libc.send.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
_libc.send.restype = ctypes.c_ssize_t
_SMALL = 64 << 10


def send_soon(sock: socket.socket, data: bytes) -> None:
    """sock.sendall that keeps the interpreter lock for a small message, which takes microseconds: beside a busy
    thread every return of the lock may cost a switch interval of 5 ms.  Raises OSError."""
    if len(data) <= _SMALL and type(sock) is socket.socket:
        sent = _libc.send(sock.fileno(), data, len(data), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if sent == len(data):
            return
        data = data[max(sent, 0) :]
    sock.sendall(data)  # there is no room at once, or an error, which this raises
