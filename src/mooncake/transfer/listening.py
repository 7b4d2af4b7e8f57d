"""Where to listen, and how a host is written."""

import errno
import random
import socket

from mooncake.errors import ConfigError


def split_host(hostname: str) -> tuple[str, int]:
    """(host, port or 0) of "host", "host:port", "[v6]" or "[v6]:port"."""
    text = hostname.strip()
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, int(rest[1:]) if rest[1:].isdigit() else 0
    host, colon, port = text.rpartition(":")
    if colon and port.isdigit() and ":" not in host:
        return host, int(port)
    return text, 0


def join_host(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_address(host: str) -> str:
    """Where to listen so that `host` reaches us: that address if it is one of this machine's, else all of them.

    Raises ConfigError if it does not resolve.
    """
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"local_hostname {host!r} does not resolve ({error}); give a name or address that other hosts reach"
        ) from None
    family, kind, _, _, address = infos[0]
    with socket.socket(family, kind) as probe:
        try:
            probe.bind((address[0], 0))
        except OSError:
            return "::" if family == socket.AF_INET6 else "0.0.0.0"
    return str(address[0])


def listen_tcp(host: str, low: int, high: int) -> socket.socket:
    """A listening socket on a free port of [low, high).  Raises OSError with a sentence."""
    family, _, _, _, address = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    ports = list(range(low, high))
    random.shuffle(ports)
    for port in ports[:200]:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address[0], port, *address[2:]))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise OSError(error.errno, f"cannot listen on {host}:{port} ({error.strerror})") from None
        return listener
    raise OSError(f"no free port between {low} and {high} on {host}")
