"""Blocking tcp sockets as this package uses them."""

import ctypes
import socket
import struct


def set_time_limit(sock: socket.socket, seconds: float) -> None:
    """Kernel-side limits on a blocking socket: cheaper than Python's, which poll before each call."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def connect(host: str, port: int, limit: float) -> socket.socket:
    """A blocking tcp connection without delays of small messages.  Raises OSError."""
    sock = socket.create_connection((host, port), timeout=limit)
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


_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: calls keep the interpreter lock
_libc.send.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
_libc.send.restype = ctypes.c_ssize_t
_SMALL = 64 << 10


def send_soon(sock: socket.socket, data: bytes) -> None:
    """sock.sendall that keeps the interpreter lock for a small message, which takes microseconds: beside a busy
    thread every return of the lock may cost a switch interval of 5 ms.  Raises OSError."""
    if len(data) <= _SMALL:
        sent = _libc.send(sock.fileno(), data, len(data), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if sent == len(data):
            return
        data = data[max(sent, 0) :]
    sock.sendall(data)  # there is no room at once, or an error, which this raises
