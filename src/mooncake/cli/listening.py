"""The port of a command that serves HTTP."""

import errno
import socket

from mooncake.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; "::" takes IPv4 too.  Raises ConfigError."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=1024, dualstack_ipv6=host == "::")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"Port {port} of {host} is in use: choose another with --port.") from None
        raise ConfigError(f"Cannot listen on port {port} of {host} ({error}): check --host and --port.") from None
