"""Segments that a store contributes later, beside the one of its set-up: each in a private server of its own."""

import threading

from mooncake.client.attachments import Attachments
from mooncake.client.child import PrivateServer
from mooncake.client.session import Session
from mooncake.rpc.segment_messages import Family
from mooncake.rpc.serving_messages import Serve
from mooncake.transfer.shm import ShmTransport

STEP = 16 << 20  # bytes that sizes are rounded up to


class Mounts:
    """The running ones, by what users know them by: "high-low" of the segment's number."""

    def __init__(self, session: Session, attachments: Attachments) -> None:
        self._session = session
        self._attachments = attachments
        self._servers: dict[str, tuple[int, PrivateServer]] = {}
        self._leaving: list[PrivateServer] = []  # in their grace period
        self._lock = threading.Lock()

    def allocate(self, size: int) -> tuple[str, int]:
        """Contribute `size` bytes more, rounded up; the segment's id and size.  Raises ConfigError, OSError."""
        size = -(-size // STEP) * STEP
        return self._start(self._session.another(size)), size

    def mount_file(self, path: str, start: int, size: int) -> str:
        """Contribute these bytes of a file; the segment's id.  Raises ConfigError, OSError."""
        return self._start(self._session.in_file(path, start, size))

    def unmount(self, names: list[str], grace: float = 0.0) -> bool:
        """Take these segments out of the pool, with the values in them; whether all were there.  With `grace` (seconds)
        nothing new comes in from now on, and what is there stays readable so long; this does not wait for it."""
        with self._lock:
            if not all(name in self._servers for name in names):
                return False
            servers = [self._servers.pop(name) for name in dict.fromkeys(names)]
            if grace:
                self._leaving += [server for _, server in servers]
        for segment, server in servers:
            if grace:
                server.retire(grace)
                threading.Thread(
                    target=self._see_off, args=(segment, server), name="mooncake-unmount", daemon=True
                ).start()
            else:
                server.close()
                self._attachments.remove_own(segment)
        return True

    def leave_disk(self) -> None:
        """What is on the disks of our servers is taken out of the pool, and nothing more is written there."""
        for server in self._all():
            server.leave_disk()

    def figures(self) -> list[Family]:
        """Metrics of our servers."""
        return [family for server in self._all() for family in server.figures()]

    def close(self) -> None:
        self.unmount(list(self._servers))
        with self._lock:
            leaving = list(self._leaving)
        for server in leaving:
            server.close()

    def _start(self, config: Serve) -> str:
        server = PrivateServer(config)
        serving, memory = server.wait()
        self._attachments.add_own(serving.info, ShmTransport(memory, serving.writer, None))
        segment = serving.info.segment
        name = f"{segment >> 32}-{segment & 0xFFFFFFFF}"
        with self._lock:
            self._servers[name] = (segment, server)
        return name

    def _see_off(self, segment: int, server: PrivateServer) -> None:
        server.ended()
        server.close()
        self._attachments.remove_own(segment)
        with self._lock:
            self._leaving.remove(server)

    def _all(self) -> list[PrivateServer]:
        """With that of the set-up."""
        first = self._session.server
        with self._lock:
            return ([first] if first is not None else []) + [server for _, server in self._servers.values()]
