"""Another engine, by its session name: how it is reached, and moving bytes and words to it."""

import logging
import os
import secrets
import threading
from collections.abc import Callable
from typing import cast

from mooncake.errors import TransferError
from mooncake.rpc.client import Connection
from mooncake.rpc.engine_messages import (
    EAGER_SIZE,
    EngineExported,
    EngineExports,
    EngineNotify,
    EngineOpen,
    EngineOpened,
    EngineRead,
    EngineWrite,
    Exported,
)
from mooncake.rpc.messages import Hello
from mooncake.transfer.cma import CmaLink, CmaRefusedError, NotBegunError, start_of
from mooncake.transfer.cuda import driver
from mooncake.transfer.host import pid_namespace
from mooncake.transfer.pieces import Pieces
from mooncake.transfer.staging import receive_pieces, send_pieces
from mooncake.transfer.stream_pool import StreamPool, receive_codes, receive_reply, send_message

logger = logging.getLogger("mooncake.engine")


class Peer:
    """One session.  Its process may be restarted: then it is opened again."""

    def __init__(
        self,
        session: str,
        hello: Hello,
        limit: float,
        force_tcp: bool,
        is_mapped: Callable[[Pieces, bool], bool],
        watch: Callable[[int, Callable[[], None]], None],
        instance: int = 0,
    ) -> None:
        """Connects to nothing yet.  `is_mapped` says of our pieces whether they are known to be memory (writable if
        True), `watch` runs something when a pidfd's process ends.  Only the process of that `instance` is meant (0: any
        that listens there).  Raises ValueError if `session` is no address."""
        self.address = (session, instance)
        self._session = session
        self._force_tcp = force_tcp
        self._is_mapped = is_mapped
        self._watch = watch
        self._streams = StreamPool(session, hello, limit, one_life=True, instance=instance)
        self._link: CmaLink | None = None
        self._without_link = 0  # the peer's life that has to be reached by tcp
        self._opening = threading.Lock()
        self.refused = 0  # how often this host did not permit cma

    def open(self) -> CmaLink | None:
        """The link to its process; None where tcp must do.  Raises TransferError if it cannot be reached."""
        link = self._link
        if link is not None and link.alive():
            return link
        if self._without_link and self._without_link == self._streams.term:
            return None
        with self._opening:
            if self._link is not None and self._link.alive():
                return self._link
            self._drop_link()
            return self._open()

    def move(self, write: bool, local: Pieces, remote: Pieces, deadline: float) -> str:
        """Copy `local` to `remote` or back; the transport that did it.  Raises TransferError."""
        link = self.open()
        if link is not None:
            try:
                moved = self._move_here(link, write, local, remote, deadline)
            except NotBegunError:  # it has just been closed or taken back: ask who is there now
                link = self.open()
                moved = self._move_here(link, write, local, remote, deadline) if link is not None else ""
            if moved:
                return moved
        trusted = len(local.lengths) > 1 and self._is_mapped(local, not write)
        move = self._write if write else self._read
        code = self._streams.exchange(lambda stream: move(stream, local, remote, trusted, deadline))
        if code:
            raise TransferError(f"a range is not inside one registered region of {self._session}")
        return "tcp"

    def notify(self, name: str, text: str) -> None:
        """Deliver a notification.  Raises TransferError."""
        message = EngineNotify(secrets.randbits(62), name, text)

        def notify(stream: Connection) -> int:
            send_message(stream.sock, message)
            return receive_codes(stream.sock).codes[0]

        if self._streams.exchange(notify):
            raise TransferError("the peer has too many notifications that nobody has taken")

    def first_buffer(self) -> int:
        """Address of its first registered region, 0 none.  Raises TransferError."""
        return self._ask(EngineOpen(0, 0, "")).first_buffer

    def probe(self) -> None:
        """Raise TransferError unless it answers a new stream's greeting."""
        self._streams.greet()

    @property
    def unused(self) -> bool:
        link = self._link
        return self._streams.unused and (link is None or not link.alive())

    def close(self) -> None:
        with self._opening:
            self._drop_link()
        self._streams.close()

    # -- opening

    def _open(self) -> CmaLink | None:
        if self._force_tcp:
            self._streams.exchange(lambda stream: None)
            self._without_link = self._streams.term
            return None
        namespace = pid_namespace()
        opened = self._ask(EngineOpen(os.getpid(), start_of(os.getpid()), namespace))
        if opened.slot >= 0 and opened.namespace == namespace:
            try:
                link = self._link = CmaLink(opened)
            except CmaRefusedError as error:
                self.refused += 1
                logger.warning(
                    "copying straight from and to %s is not permitted here, tcp is used: %s", self._session, error
                )
            else:
                self._watch(link.pidfd, self._drop_link)
                logger.info("%s is reached by cma", self._session)
                return link
        else:
            logger.info("%s is reached by tcp", self._session)
        self._without_link = self._streams.term
        return None

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
            self._streams.drop_idle()

    def _move_here(self, link: CmaLink, write: bool, local: Pieces, remote: Pieces, deadline: float) -> str:
        """On this host: by which transport, "" if it has to be tcp.  Raises as CmaLink.move."""
        if not (driver.is_loaded() or link.has_device_memory):
            link.move(write, local, remote, deadline)
            return "cma"
        from mooncake.transfer.device_moves import DeviceMoves, NotReachedError

        with self._opening:
            moves = link.companion or link.keep(DeviceMoves(link, self._ask_exports))
        is_host = self._is_mapped(local, not write)
        try:
            if moves.move(write, local, remote, is_host, deadline):
                return "cuda"
        except NotReachedError:
            return ""
        link.move(write, local, remote, deadline)
        return "cma"

    def _ask_exports(self, numbers: list[int]) -> list[Exported]:
        def ask(stream: Connection) -> EngineExported:
            send_message(stream.sock, EngineExports(numbers))
            return cast(EngineExported, receive_reply(stream.sock))

        return self._streams.exchange(ask).exported

    # -- one exchange

    def _ask(self, message: EngineOpen) -> EngineOpened:
        def ask(stream: Connection) -> EngineOpened:
            send_message(stream.sock, message)
            return cast(EngineOpened, receive_reply(stream.sock))

        return self._streams.exchange(ask)

    def _write(self, stream: Connection, local: Pieces, remote: Pieces, trusted: bool, deadline: float) -> int:
        sock = stream.sock
        asks = local.total > EAGER_SIZE
        send_message(sock, EngineWrite(remote.addresses.tobytes(), remote.lengths.tobytes()), more=not asks)
        if asks:
            code = receive_codes(sock).codes[0]
            if code:
                return code
        send_pieces(sock, local, trusted, deadline)
        return receive_codes(sock).codes[0]

    def _read(self, stream: Connection, local: Pieces, remote: Pieces, trusted: bool, deadline: float) -> int:
        sock = stream.sock
        send_message(sock, EngineRead(remote.addresses.tobytes(), remote.lengths.tobytes()))
        code = receive_codes(sock).codes[0]
        if not code:
            receive_pieces(sock, local, trusted, deadline)
        return code
