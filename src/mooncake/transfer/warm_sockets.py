"""Where segment servers without an engine wait for the next one: unix sockets whose names say for whom.

    mooncake-warm-<user id>-<mark>-<segment>[.sock]     abstract, or in the directory for sockets

The mark is a hash of all settings that have to be the same.  Either side goes on only with a process of its own user.
"""

import contextlib
import hashlib
import os
import re
import socket
import stat
import struct

_CREDENTIALS = struct.Struct("3i")
_LISTENS = 0x10000  # of the flags in /proc/net/unix; an accepted connection has the same name
_NAME = re.compile(r"mooncake-warm-(\d+)-([0-9a-f]{8})-[0-9a-f]{16}(?:\.sock)?")


def mark_of(settings: str) -> str:
    return hashlib.sha256(settings.encode()).hexdigest()[:8]


def listen(directory: str, settings: str, segment: int) -> tuple[socket.socket, str]:
    """A listening socket, and the path that it has in `directory` ("" if it is abstract).  Raises OSError."""
    name = f"mooncake-warm-{os.geteuid()}-{mark_of(settings)}-{segment:016x}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path = os.path.join(directory, name + ".sock") if directory else ""
        listener.bind(path or "\0" + name)
        if path:
            os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
        listener.listen(16)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener, path


def waiting(directory: str, settings: str | None = None) -> list[str]:
    """Addresses of the servers of this user that wait for an engine with these `settings` (None: with any)."""
    wanted = None if settings is None else mark_of(settings)
    found = []
    for name in _names(directory):
        match = _NAME.fullmatch(name)
        if match is not None and int(match[1]) == os.geteuid() and wanted in (None, match[2]):
            found.append(os.path.join(directory, name) if directory else "\0" + name)
    return found


def connect(address: str) -> socket.socket:
    """A blocking connection to a server of this user.  Raises OSError, also if it is another user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(address)
        if peer_of(sock)[1] != os.geteuid():
            raise PermissionError("it is another user's")
    except ConnectionRefusedError:
        sock.close()
        if not address.startswith("\0"):  # nobody listens there any more
            with contextlib.suppress(OSError):
                os.unlink(address)
        raise
    except BaseException:
        sock.close()
        raise
    return sock


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the other side; the first is 0 if it is in another pid namespace."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def _names(directory: str) -> list[str]:
    with contextlib.suppress(OSError):
        if directory:
            return sorted(os.listdir(directory))
        with open("/proc/net/unix") as f:
            sockets = [line.split() for line in f if " @mooncake-warm-" in line]
        return sorted(fields[-1][1:] for fields in sockets if int(fields[3], 16) & _LISTENS)
    return []
