"""What a command needs to know about servers on this host: which ports are free, and what they answer."""

import http.client
import socket
from contextlib import ExitStack

from mooncake.security.secret import authorization

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports of the loopback interface that nothing listens on at this moment."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def accepts(port: int) -> bool:
    """Whether something listens."""
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def fetch(port: int, path: str, timeout: float = 2.0, method: str = "GET") -> str | None:
    """The text that `GET path` brings; None when there is no answer or it is not 200."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request(method, path, headers=authorization())
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return text if answer.status == 200 else None


def metric(text: str, name: str, **labels: str) -> float:
    """The sum of the series of one metric, in Prometheus's text format, that have these labels; 0 if there is none."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    total = 0.0
    for line in text.splitlines():
        if (
            line.startswith(name)
            and line[len(name) : len(name) + 1] in ("{", " ")
            and all(one in line for one in wanted)
        ):
            total += float(line.rpartition(" ")[2])
    return total
