"""Who listens where on this host, and how it was started, from /proc.

Sees other users' processes only as root, and those of this network and pid namespace.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LISTENING = "0A"


@dataclass(frozen=True)
class Process:
    pid: int
    command: tuple[str, ...]  # empty if it may not be read
    environment: dict[str, str] | None  # as it was started with; None if it may not be read
    state: str  # one letter, as ps has it
    parent: int

    @property
    def name(self) -> str:
        """Short, for people."""
        words = [os.path.basename(word) for word in self.command[:1]] + list(self.command[1:])
        text = " ".join(words)
        return f"{text[:57]}..." if len(text) > 60 else text or "a process that may not be looked at"

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")


def listeners(port: int) -> list[int]:
    """Pids that listen on a TCP port; [0] when somebody does whose pid cannot be seen, [] when nobody does."""
    inodes = set(_listening_inodes(port))
    if not inodes:
        return []
    return sorted(_owners(inodes)) or [0]


def listening_ports(pid: int) -> list[int]:
    """TCP ports that a process listens on."""
    held = set(_socket_inodes(pid))
    return sorted({port for port, inode in all_listening() if inode in held})


def process(pid: int) -> Process | None:
    """None if there is none any more."""
    try:
        state, parent, *_ = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    command: tuple[str, ...] = ()
    environment: dict[str, str] | None = None
    with contextlib.suppress(OSError):
        text = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        command = tuple(text.rstrip("\0").split("\0")) if text else ()
    with contextlib.suppress(OSError):
        words = (_PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
        pairs = [word.partition("=") for word in words if "=" in word]
        environment = {name: value for name, _, value in pairs}
    return Process(pid, command, environment, state, int(parent))


def descendants(pid: int) -> list[int]:
    """A process's children, their children and so on."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((_PROC / entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found, waiting = list[int](), [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def is_local(host: str) -> bool:
    """Whether an address is one of this host's, so that /proc says who listens there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
    except OSError:
        return False
    return True


def all_listening() -> Iterator[tuple[int, str]]:
    """(port, inode) of every listening TCP socket of this network namespace."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING:
                    yield int(fields[1].rpartition(":")[2], 16), fields[9]


def _listening_inodes(port: int) -> Iterator[str]:
    return (inode for found, inode in all_listening() if found == port)


def _owners(inodes: set[str]) -> Iterator[int]:
    for entry in os.listdir(_PROC):
        if entry.isdigit() and not inodes.isdisjoint(_socket_inodes(int(entry))):
            yield int(entry)


def _socket_inodes(pid: int) -> Iterator[str]:
    folder = _PROC / str(pid) / "fd"
    with contextlib.suppress(OSError):
        for entry in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(folder / entry)
                if target.startswith("socket:["):
                    yield target[8:-1]
