"""The port of a command that serves HTTP."""

import errno
import socket

from mooncake.errors import ConfigError
from mooncake.security.tls_files import check_files


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; "::" takes IPv4 too.  Raises ConfigError."""
    bound = bind(host, port)
    try:
        bound.listen(1024)
    except OSError as error:
        bound.close()
        raise no_port(host, port, error) from None
    return bound


def bind(host: str, port: int) -> socket.socket:
    """As listen, but connections are refused until `listen` is called on it: who tries the port sees nobody yet."""
    check_files()
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
            bound.bind(address[:2])
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise no_port(host, port, error) from None
    return bound


def no_port(host: str, port: int, error: OSError) -> ConfigError:
    """What to say when the port cannot be had."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"Port {port} of {host} is in use: choose another with --port.")
    return ConfigError(f"Cannot listen on port {port} of {host} ({error}): check --host and --port.")
