"""Asking ports that speak TLS, as members of the cluster and as others."""

import contextlib
import http.client
import socket

from mooncake.rpc.client import Connection
from mooncake.rpc.messages import PROTOCOL, Hello
from mooncake.rpc.sockets import connect, set_time_limit
from mooncake.security import tls

HELLO = Hello(PROTOCOL, "test", "client", "1-1", "elsewhere")


def asked(port: int, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    found = tls.contexts()
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=found.client)
    with contextlib.closing(connection):
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def tried(port: int, path: str):
    with contextlib.suppress(OSError, http.client.HTTPException):
        return asked(port, path)


def plain_answer(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 5) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        return sock.makefile("rb").read()


def is_served(kind: str, port: int) -> bool:
    if kind in ("admin", "probe"):
        return asked(port, "/health")[0] == 200
    connection = Connection(connect("127.0.0.1", port, 3))
    set_time_limit(connection.sock, 3)
    with contextlib.closing(connection):
        return connection.greet(HELLO).version != ""
