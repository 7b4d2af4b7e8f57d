"""The segment server's connection to the master: mount, heartbeats, kills; again and again, whatever happens to it."""

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, cast

import msgspec

from mooncake.election.places import master_place
from mooncake.errors import ErrorCode, StoreError
from mooncake.rpc import frame
from mooncake.rpc.client import Connection
from mooncake.rpc.disk_messages import DiskMounted, DiskOrders, DiskReport
from mooncake.rpc.message import Message
from mooncake.rpc.messages import (
    DECODERS,
    KINDS,
    PROTOCOL,
    SEGMENT,
    Codes,
    Failure,
    Heartbeat,
    Hello,
    Kill,
    Mount,
    Mounted,
    SegmentInfo,
    Unmount,
    encode,
)
from mooncake.rpc.segment_messages import DiskUnmount, Draining, Retire
from mooncake.rpc.sockets import connect, set_time_limit
from mooncake.rpc.task_messages import CopyPart
from mooncake.segment.copies import Copies
from mooncake.segment.owner import Owner
from mooncake.version import __version__

if TYPE_CHECKING:
    from mooncake.segment.disk.tier import Tier

logger = logging.getLogger("mooncake.segment")

HEARTBEAT = 1.0  # seconds
SILENCE = 3.0  # a master that says nothing so long is given up
RETRY = 0.1
CALL_LIMIT = 5.0
TELL_LIMIT = 1.5
FIRST_LIMIT = 8.0  # for the first mount, where a leader has to be elected first
ANNOUNCED_AHEAD = 4  # announcements on their way to the master, so that neither side waits for the other
SETTLE = 0.02  # how often to look whether a writer has gone while a kill waits for it

_LOST = (OSError, StoreError, frame.FramingError, msgspec.MsgspecError)


class MasterLink(threading.Thread):
    """Keeps one segment mounted.  `ready` is set once the first mount has succeeded or failed for good."""

    def __init__(self, master: str, info: SegmentInfo, owner: Owner) -> None:
        super().__init__(name="mooncake-master-link", daemon=True)
        self._place = master_place(master)
        self._master = self._place.text
        self._info = info
        self._owner = owner
        self.hello = Hello(PROTOCOL, __version__, SEGMENT, info.client, info.host)
        self._copies = Copies(owner.memory, self.hello)
        self._stopping = threading.Event()
        self._renamed = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self.tier: Tier | None = None
        self._tier_mounted = False
        self.ready = threading.Event()
        self.mounted = False
        self.refused = ""  # why the first mount failed
        self.mounts = 0
        self.forgotten: Callable[[], None] = lambda: None  # called when the master no longer knows the segment
        self._standing: list[Message] = []  # what every master is to be told
        self._draining: Draining | None = None  # what the next master is to be told of it
        self._told: dict[int, threading.Event] = {}  # set when one has answered, by kind of message

    def run(self) -> None:
        first = True
        give_up = time.monotonic() + min(self._place.wait_s, FIRST_LIMIT)
        while not self._stopping.is_set():
            connection: Connection | None = None
            try:
                connection = self._mount()
                if not first:
                    logger.info("segment %s is mounted again at master %s", self._info.name, self._master)
                first = False
                self.mounted = True
                self.mounts += 1
                self.ready.set()
                self._serve(connection)
            except _LOST as error:
                if first and (isinstance(error, StoreError) or time.monotonic() >= give_up):
                    self.refused = str(error) if isinstance(error, StoreError) else self._place.unreachable(error)
                    self.ready.set()
                    return
                if connection is not None:
                    logger.warning("lost the master at %s (%s); trying again", self._master, error)
                self._stopping.wait(RETRY)
            finally:
                self.mounted = False
                if connection is not None:
                    connection.close()

    def wake(self) -> None:
        """There is something to do besides waiting."""
        with contextlib.suppress(BlockingIOError):  # it will wake
            os.write(self._wake_write, b"x")

    def tell(self, message: Message) -> None:
        """Have this said to the master, and to every later one; waits until one has heard it, but not for long."""
        told = self._told.setdefault(KINDS[type(message)], threading.Event())
        self._standing.append(message)
        self.wake()
        told.wait(TELL_LIMIT)

    def rename(self, client: str) -> None:
        """Be another client to the master, on a new connection: one that is gone shall be seen to be gone."""
        self._info.client = client
        self.hello = msgspec.structs.replace(self.hello, client=client)
        self._renamed.set()
        self.wake()

    def stop(self) -> None:
        """Unmount (within a second) and end the thread."""
        self._stopping.set()
        self.wake()
        self.join(1.5)

    # -- one connection

    def _mount(self) -> Connection:
        """A greeted connection with the segment mounted on it."""
        connection = Connection(connect(*self._place.find(), 1.0))
        try:
            set_time_limit(connection.sock, CALL_LIMIT)
            former = self._owner.memory.table
            served, lease_ms = former.term, former.lease_ms
            welcome = connection.greet_master(self.hello, self._place)
            if welcome.term < served:
                self._refuse(connection, served)
            self._owner.serve_master(welcome.term, max(welcome.lease_ms, lease_ms))
            mounted = cast(Mounted, connection.call(Mount(self._info, served, lease_ms)))
            if not mounted.resumed:
                connection.call_each(self._owner.announcements(), ANNOUNCED_AHEAD)
        except BaseException:
            connection.close()
            raise
        return connection

    def _refuse(self, connection: Connection, served: int) -> NoReturn:
        """This master is older than the one that was served last: it hears so, and is not served."""
        connection.call(Mount(self._info, served, self._owner.memory.table.lease_ms))
        raise StoreError(ErrorCode.INVALID_VERSION, f"a master of term {served} was served already")

    def _serve(self, connection: Connection) -> None:
        """Until the connection breaks, we stop, or are to be another client."""
        self._tier_mounted = False
        if self._draining is not None:
            _send(connection, self._draining)
        said = 0
        sock = connection.sock
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        heard = time.monotonic()
        beat_at = heard + HEARTBEAT
        while not self._stopping.is_set():
            if self._renamed.is_set():
                self._renamed.clear()
                return
            now = time.monotonic()
            if now >= beat_at:
                if not self._owner.memory.is_whole:
                    logger.error("the file of segment %s has been cut short: it leaves the pool", self._info.name)
                    self._stopping.set()
                    break
                _send(connection, Heartbeat([self._info.segment]))
                beat_at = now + HEARTBEAT
            if now - heard > SILENCE:
                raise ConnectionError(f"it has said nothing for {SILENCE:.0f} s")
            while said < len(self._standing):
                self._say(connection, self._standing[said])
                said += 1
            if self.tier is not None and self.tier.ready:
                self._serve_tier(connection, self.tier)
            while connection.strays:
                self._handle(connection, connection.strays.pop(0))
            pause = SETTLE if self._owner.waiting or self._copies.busy else beat_at - now
            ready = [descriptor for descriptor, _ in poll.poll(max(pause, 0.001) * 1e3)]
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            if sock.fileno() in ready:
                got = connection.receive()
                heard = time.monotonic()
                for message in got:
                    self._handle(connection, message)
            while (ended := self._copies.take_finished()) is not None:
                _send(connection, ended)
            settled = self._owner.settle()
            if settled:
                _send(connection, settled)
        self._unmount(connection)

    def _say(self, connection: Connection, message: Message) -> None:
        if isinstance(message, DiskUnmount) and self.tier is not None:
            self.tier.leave()
            self.tier = None
        _send(connection, message)

    def _serve_tier(self, connection: Connection, tier: "Tier") -> None:
        """Mount it, once on a connection, and report what came of orders."""
        if not self._tier_mounted:
            try:
                reply = cast(DiskMounted, connection.call(tier.mount()))
            except StoreError as error:
                logger.warning("the SSD tier is not used: %s", error)
                tier.stop()
                self.tier = None
                return
            for announcement in tier.mounted(reply):
                connection.call(announcement)
            self._tier_mounted = True
            if (report := tier.unacknowledged()) is not None:
                _send(connection, report)
        if (report := tier.report()) is not None:
            _send(connection, report)

    def _handle(self, connection: Connection, got: frame.Frame) -> None:
        if got.flags & frame.REPLY:
            self._handle_reply(got)
            return
        message = DECODERS[got.kind].decode(got.body) if got.kind in DECODERS else None
        if isinstance(message, Kill):
            killed = self._owner.kill(message)
            if killed.slots:
                _send(connection, killed)
        elif isinstance(message, CopyPart):
            self._copies.begin(message)
        elif isinstance(message, Draining):
            self._draining = message if any(message.job) else None
        elif isinstance(message, DiskOrders) and self.tier is not None:
            self.tier.order(message)

    def _handle_reply(self, got: frame.Frame) -> None:
        """To a heartbeat or a report."""
        if got.flags & frame.FAILED:
            failure = cast(Failure, DECODERS[KINDS[Failure]].decode(got.body))
            raise StoreError(ErrorCode(failure.code), failure.text)
        if any(cast(Codes, DECODERS[KINDS[Codes]].decode(got.body)).codes):
            self.forgotten()
            raise StoreError(ErrorCode.SEGMENT_NOT_FOUND, "it no longer knows this segment")
        if got.kind == KINDS[DiskReport] and self.tier is not None:
            self.tier.acknowledged()
        if got.kind in self._told:
            self._told[got.kind].set()

    def _unmount(self, connection: Connection) -> None:
        with contextlib.suppress(*_LOST):
            set_time_limit(connection.sock, 1.0)
            connection.call(Unmount([self._info.segment]))


def _send(connection: Connection, message: Message) -> None:
    """A heartbeat or a report (whose replies `_handle` sees), or a one-way message."""
    is_request = isinstance(message, Heartbeat | DiskReport | Retire | DiskUnmount)
    flags = frame.REQUEST if is_request else frame.ONE_WAY
    connection.sock.sendall(frame.pack(KINDS[type(message)], flags, 0, encode(message)))
