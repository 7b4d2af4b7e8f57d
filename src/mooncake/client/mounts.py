"""Segments that a store contributes later, beside the one of its set-up: each in a private server of its own."""

import threading

from mooncake.client.attachments import Attachments
from mooncake.client.child import PrivateServer
from mooncake.client.session import Session
from mooncake.transfer.shm import ShmTransport

STEP = 16 << 20  # bytes that sizes are rounded up to


class Mounts:
    """The running ones, by what users know them by: "high-low" of the segment's number."""

    def __init__(self, session: Session, attachments: Attachments) -> None:
        self._session = session
        self._attachments = attachments
        self._servers: dict[str, tuple[int, PrivateServer]] = {}
        self._lock = threading.Lock()

    def allocate(self, size: int) -> tuple[str, int]:
        """Contribute `size` bytes more, rounded up; the segment's id and size.  Raises ConfigError, OSError."""
        size = -(-size // STEP) * STEP
        server = PrivateServer(self._session.another(size))
        serving, memory = server.wait()
        self._attachments.add_own(serving.info, ShmTransport(memory, serving.writer, None))
        segment = serving.info.segment
        name = f"{segment >> 32}-{segment & 0xFFFFFFFF}"
        with self._lock:
            self._servers[name] = (segment, server)
        return name, size

    def unmount(self, names: list[str]) -> bool:
        """Take these segments out of the pool, with the values in them; whether all were there."""
        with self._lock:
            if not all(name in self._servers for name in names):
                return False
            servers = [self._servers.pop(name) for name in dict.fromkeys(names)]
        for segment, server in servers:
            server.close()
            self._attachments.remove_own(segment)
        return True

    def close(self) -> None:
        self.unmount(list(self._servers))
