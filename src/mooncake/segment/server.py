"""The segment server's process: makes the memory, hands descriptors to same-host clients, lives as long as its engine.

Threads: this one (unix socket, life of engine and writers), the master link, tcp streams, and one that makes the memory
resident ahead of use.  It imports neither numpy nor the command-line libraries, so that it starts fast and stays small.
"""

import contextlib
import logging
import os
import secrets
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mooncake.errors import ConfigError, ErrorCode, StoreError
from mooncake.rpc import frame
from mooncake.rpc.data_messages import Attach, Attached
from mooncake.rpc.descriptors import allow_many
from mooncake.rpc.handshake import Guard
from mooncake.rpc.messages import DECODERS, PROTOCOL, Failure, SegmentInfo, Welcome, encode
from mooncake.rpc.segment_messages import DiskUnmount, Family, Retire
from mooncake.rpc.serving_messages import Serve
from mooncake.security.secret import read_secret
from mooncake.segment.figures import segment_families
from mooncake.segment.link import MasterLink
from mooncake.segment.owner import Owner
from mooncake.segment.streams import Streams
from mooncake.segment.writers import Writer, Writers
from mooncake.transfer.file_memory import FileMemory
from mooncake.transfer.listening import join_host, listen_tcp
from mooncake.transfer.memory import SegmentMemory
from mooncake.transfer.metadata.entries import Address
from mooncake.transfer.table import table_size
from mooncake.version import __version__

if TYPE_CHECKING:
    from mooncake.transfer.metadata.publication import Publication

logger = logging.getLogger("mooncake.segment")

_CREDENTIALS = struct.Struct("3i")
_MAX_ATTACHED = 4096


class SegmentServer:
    """Serves one segment.  `start` mounts it; `run` returns when `stop` was asked for."""

    def __init__(self, config: Serve) -> None:
        allow_many()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._running = True
        self._ends_at: float | None = None
        self._writers = Writers()
        self._memory = (
            FileMemory.open(config.segment, config.path, config.start, config.capacity)
            if config.path
            else SegmentMemory.create(config.segment, config.memory)
        )
        self._size = config.capacity
        self._file = config.start if config.path else -1
        self._owner = Owner(config.segment, self._memory, self._writers)
        self._attached = 0
        self._reserved = 0
        self._secret = read_secret()
        self.watch(self._wake_read, lambda: None)
        listener = listen_tcp(config.listen, config.min_port, config.max_port)
        self._unix, name = _listen_unix(config.socket_dir, config.segment)
        self._unix_path = "" if name.startswith("@") else name
        self.info = SegmentInfo(
            segment=config.segment,
            name=config.name,
            size=config.capacity,
            tcp=join_host(config.announce, listener.getsockname()[1]),
            unix=name,
            host=config.host,
            client=config.client,
            protocol=config.protocol,
            endpoint=config.endpoint,
        )
        self._address = Address(config.announce, listener.getsockname()[1], config.segment)
        self._metadata = config.metadata
        self._publication: Publication | None = None
        self.watch(self._unix.fileno(), self._accept)
        self._streams = Streams(listener, self._owner)
        self._link = MasterLink(config.master, self.info, self._owner)
        if config.disk is not None:
            from mooncake.segment.disk.tier import Tier

            start = config.memory - config.disk.staging
            tier = Tier(config.disk, start, self._owner, self._link.hello, self._link.wake)
            self._streams.tier = self._link.tier = tier

    @property
    def descriptors(self) -> list[int]:
        return [self._memory.data_fd, self._memory.table_fd]

    @property
    def mounted(self) -> bool:
        """Whether a master serves this segment now."""
        return self._link.mounted

    def start(self) -> None:
        """Serve, publish and mount.  Raises ConfigError with the reason if the master refuses or is not there,
        MetadataError likewise of the metadata service."""
        self._streams.start()
        if self._metadata:
            self._publish()
        self._link.start()
        self._link.ready.wait()
        if self._link.refused:
            if self._publication is not None:
                self._publication.close()
            raise ConfigError(f"segment {self.info.name} cannot be mounted: {self._link.refused}")
        if self._link.tier is not None:
            self._link.tier.start()
        threading.Thread(target=self._reserve, name="mooncake-reserve", daemon=True).start()

    def _publish(self) -> None:
        from mooncake.transfer.metadata.publication import Publication, open_for_entries

        backend = open_for_entries(self._metadata)
        self._publication = Publication(backend, self.info.name, self._address, list)

    def watch(self, descriptor: int, action: Callable[[], object]) -> None:
        """Have `run` call `action` whenever there is something to read."""
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def unwatch(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def run(self) -> None:
        while self._running:
            left = None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())
            for key, _ in self._selector.select(left):
                key.data()
            if self._ends_at is not None and time.monotonic() >= self._ends_at:
                return

    def serve_engine(self, pidfd: int, gone: Callable[[], None]) -> int:
        """The engine behind `pidfd` writes here too; `gone` is called at its end.  Its number as a writer.

        Raises OSError for what is no pidfd; it is closed then."""
        writer = self._writers.add_pidfd(pidfd)

        def ended() -> None:
            self.unwatch(pidfd)
            self._writers.remove(writer)
            gone()

        try:
            self.watch(pidfd, ended)
        except OSError:
            self._writers.remove(writer)
            raise
        return writer.number

    def when_forgotten(self, action: Callable[[], None]) -> None:
        """Have `action` called, by another thread, when the master says that it does not know the segment any more."""
        self._link.forgotten = action

    def leave_client(self) -> None:
        """The engine whose client we were is gone: its puts and leases shall not count as those of somebody alive."""
        self._link.rename(f"{secrets.randbits(64)}-{secrets.randbits(64)}")

    def end_in(self, seconds: float) -> None:
        """Make `run` return then."""
        self._ends_at = time.monotonic() + seconds

    def stay(self) -> None:
        """Undo `end_in`."""
        self._ends_at = None

    def stop(self) -> None:
        """Make `run` return; callable from a signal handler."""
        self._running = False
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def retire(self, grace: float) -> None:
        """Make `run` return after `grace` seconds; the master places nothing here any more."""
        self.end_in(grace)
        self._link.tell(Retire(self.info.segment))

    def unmount(self) -> None:
        """At the master, which drops what is here."""
        self._link.stop()

    def leave_disk(self) -> None:
        """Take what is on disk out of the pool, and write nothing there any more."""
        if self._link.tier is not None:
            self._link.tell(DiskUnmount(self.info.segment))

    def figures(self) -> list[Family]:
        """How this segment's server is."""
        return segment_families(self.info, self._link, self._streams, self._owner, self._attached, self._reserved)

    def close(self) -> None:
        """Unmount and let go; the memory itself goes with the last process that maps it."""
        self._link.stop()
        tier = self._link.tier
        if tier is not None:
            tier.stop()
        if self._publication is not None:
            self._publication.close()
        if self._unix_path:
            with contextlib.suppress(OSError):
                os.unlink(self._unix_path)
        self._unix.close()

    # -- same-host clients

    def _accept(self) -> None:
        try:
            connection, _ = self._unix.accept()
        except OSError as error:  # no descriptor is left, perhaps: it stays in the queue
            _out_of_descriptors(error)
            return
        try:
            pid, uid, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid not in (0, os.geteuid()) or self._attached >= _MAX_ATTACHED:
                connection.close()
                return
            writer = self._writers.process(pid) or self._add_process(pid)
        except OSError:
            connection.close()
            return
        connection.setblocking(False)
        self._attached += 1
        guard = Guard(self._secret)

        def ready() -> None:
            try:
                data = connection.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            try:
                if data:
                    self._attach(connection, guard, writer.number, data)
                    return
            except frame.FramingError:
                pass
            self._selector.unregister(connection)
            connection.close()
            self._attached -= 1
            if writer.pidfd < 0:  # otherwise it may still have the mapping, until it dies
                self._writers.remove(writer)

        self._selector.register(connection, selectors.EVENT_READ, ready)

    def _add_process(self, pid: int) -> Writer:
        """One writer a process, however often it attaches."""
        writer = self._writers.add_process(pid)

        def ended() -> None:
            self._selector.unregister(writer.pidfd)
            self._writers.remove(writer)

        if writer.pidfd >= 0:
            self.watch(writer.pidfd, ended)
        return writer

    def _attach(self, connection: socket.socket, guard: Guard, writer: int, data: bytes) -> None:
        """Raises FramingError."""
        with contextlib.suppress(OSError, ValueError):
            for got in frame.FrameReader().feed(data):
                message = DECODERS[got.kind].decode(got.body) if got.kind in DECODERS else None
                try:
                    welcome = None if message is None else guard.answer(message, self._welcome)
                except StoreError as error:
                    failure = Failure(int(error.code), str(error))
                    connection.send(frame.pack(got.kind, frame.REPLY | frame.FAILED, got.request_id, encode(failure)))
                    return
                if welcome is not None:
                    connection.send(frame.pack(got.kind, frame.REPLY, got.request_id, encode(welcome)))
                elif isinstance(message, Attach) and message.segment == self.info.segment:
                    memory = self._memory
                    reply = Attached(writer, memory.size, table_size(memory.size), self._file)
                    answer = frame.pack(got.kind, frame.REPLY, got.request_id, encode(reply))
                    socket.send_fds(connection, [answer], self.descriptors)
                else:
                    failure = Failure(ErrorCode.SEGMENT_NOT_FOUND, "another segment is served here")
                    connection.send(frame.pack(got.kind, frame.REPLY | frame.FAILED, got.request_id, encode(failure)))

    def _welcome(self) -> Welcome:
        return Welcome(PROTOCOL, __version__, 0, 0, self.info.segment)

    # -- memory

    def _reserve(self) -> None:
        """Touch the memory ahead of use, so that no client pays for fresh pages; politely."""
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while self._reserved < self._size and self._running:
            try:
                self._reserved = self._memory.reserve(self._reserved)
            except OSError as error:
                logger.error(
                    "only %d of %d bytes of segment %s could be reserved (%s); give it a smaller "
                    "global_segment_size or the machine more memory",
                    self._reserved,
                    self._size,
                    self.info.name,
                    error.strerror,
                )
                return


def _out_of_descriptors(error: OSError) -> None:
    """A connection could not be taken; it stays in the queue, so do not ask again at once."""
    logger.warning("cannot take a connection now: %s", error)
    time.sleep(0.1)


def _listen_unix(directory: str, segment: int) -> tuple[socket.socket, str]:
    """The socket that hands descriptors out, and its public name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if directory:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        path = os.path.join(directory, f"mooncake-{segment:016x}.sock")
        listener.bind(path)
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
        name = path
    else:
        name = f"@mooncake-{segment:016x}"
        listener.bind("\0" + name[1:])
    listener.listen(128)
    return listener, name
