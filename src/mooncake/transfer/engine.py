"""One process's transfer engine: what it has registered, who may ask for it, and the peers it moves bytes from and to.

Regions    registered memory, and when it may be used again
Endpoint   our port and its threads
Peer       another engine: reached by cma (same host), else by tcp
Names      where a peer is; Publication: that we are here.  Both only matter with a metadata service
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from mooncake.errors import MetadataError, MooncakeError, StoreError, TransferError, TransferTimedOut
from mooncake.rpc.engine_messages import EngineNotify
from mooncake.rpc.messages import PROTOCOL, Hello
from mooncake.security.secret import read_secret
from mooncake.security.tls_files import check_files
from mooncake.transfer import cma
from mooncake.transfer.endpoint import Endpoint
from mooncake.transfer.host import host_id
from mooncake.transfer.listening import listen_address, listen_tcp
from mooncake.transfer.metadata.entries import Address
from mooncake.transfer.metadata.names import Names
from mooncake.transfer.peer import Peer
from mooncake.transfer.pieces import Int64Array, Pieces
from mooncake.transfer.regions import Regions
from mooncake.transfer.stream_pool import UnreachedError
from mooncake.transfer.submissions import FAILED, TIMED_OUT, Submissions
from mooncake.version import __version__

logger = logging.getLogger("mooncake.engine")

KNOWN_PEERS = 64  # beyond that, peers that are gone are forgotten
PROBE_OK, PROBE_DNS, PROBE_REFUSED, PROBE_METADATA = 0, -101, -102, -200
_Result = TypeVar("_Result")
_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


@dataclass
class EngineSettings:
    """`limit`: seconds a transfer may take, besides 1 ns a byte.  Ports: where to look for a free one.  `metadata`: the
    metadata service's address, under which `name` is published; "": peers are named by their addresses."""

    host: str
    name: str = ""
    metadata: str = ""
    limit: float = 30.0
    min_port: int = 15000
    max_port: int = 17000
    bind_address: str = ""
    force_tcp: bool = False


class Engine:
    """Thread-safe.  Dead after a fork: `pid` says whose it is."""

    def __init__(self, settings: EngineSettings) -> None:
        """Listen and serve.  Raises OSError, ConfigError or MetadataError with a sentence."""
        read_secret()  # what is wrong with it is said before anything is opened
        check_files()
        self.pid = os.getpid()
        self._settings = settings
        backend = None
        if settings.metadata:
            from mooncake.transfer.metadata.publication import Publication, open_for_entries

            backend = open_for_entries(settings.metadata)
        address = settings.bind_address or listen_address(settings.host)
        listener = listen_tcp(address, settings.min_port, settings.max_port + 1)
        self.port: int = listener.getsockname()[1]
        instance = secrets.randbits(62) + 1
        here = Address(settings.host, self.port, instance)
        self.session = settings.name or here.text
        self._names = Names(backend, self.session, here)
        self.regions = Regions()
        self._endpoint = Endpoint(listener, self.regions, instance, settings.limit)
        self._hello = Hello(PROTOCOL, __version__, "engine", self.session, host_id())
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._submissions = Submissions()
        self._moved = {"cma": 0, "tcp": 0}
        self._closed = False
        cma.allow()
        _engines.add(self)
        self._endpoint.start()
        self._publication = None
        if backend is not None:
            try:
                self._publication = Publication(backend, self.session, here, lambda: self.regions.registered)
            except BaseException:
                backend.close()
                self.close()
                raise

    # -- transfers

    def move(
        self,
        target: str,
        write: bool,
        buffers: Sequence[int],
        addresses: Sequence[int],
        lengths: Sequence[int],
        notify: tuple[str, str] | None = None,
    ) -> None:
        """Write `buffers` of ours to `addresses` of the target's, or read them from there; then notify it.

        Returns when all is done.  Raises TransferError if not all is.
        """
        local, remote = _vectors(buffers, addresses, lengths)
        self._move(target, write, local, remote, self._deadline(local))
        if notify is not None:
            self._reach(target, lambda peer: peer.notify(*notify))

    def move_pieces(self, target: str, write: bool, local: Pieces, remote: Pieces) -> None:
        """As `move`, of ranges that are arrays already; their lengths are the same, and none is 0."""
        self._move(target, write, local, remote, self._deadline(local))

    def submit(
        self, target: str, write: bool, buffers: Sequence[int], addresses: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Begin `move` in the background; the batch's number.  Raises TransferError if it cannot even begin."""
        local, remote = _vectors(buffers, addresses, lengths)
        deadline = self._deadline(local)
        if len(local.lengths):
            self._reach(target, Peer.open)

        def run() -> int:
            try:
                self._move(target, write, local, remote, deadline)
            except StoreError as error:
                logger.warning("a transfer from or to %s failed: %s", target, error)
                return TIMED_OUT if isinstance(error, TransferTimedOut) else FAILED
            return 0

        return self._submissions.submit(run)

    def _move(self, target: str, write: bool, local: Pieces, remote: Pieces, deadline: float) -> None:
        if not len(local.lengths):
            return
        transport = self._reach(target, lambda peer: peer.move(write, local, remote, deadline))
        with self._lock:
            self._moved[transport] = self._moved.get(transport, 0) + local.total

    def _deadline(self, pieces: Pieces) -> float:
        return time.monotonic() + self._settings.limit + pieces.total * 1e-9

    def status(self, number: int) -> int:
        return self._submissions.status(number)

    def wait(self, numbers: Sequence[int]) -> int:
        """0 once all batches have succeeded; -1 if one did not, or is not known.  Their limits run from `submit`."""
        return self._submissions.wait(numbers)

    def notifications(self) -> list[EngineNotify]:
        return self._endpoint.notifications()

    def first_buffer(self, target: str) -> int:
        """Raises TransferError."""
        return self._reach(target, Peer.first_buffer)

    def probe(self, target: str) -> int:
        """PROBE_OK if the target answers, else why not."""
        try:
            self._reach(target, Peer.probe)
        except TransferError as error:
            if isinstance(error.__cause__, MetadataError):
                return PROBE_METADATA
            return PROBE_DNS if isinstance(error.__cause__, socket.gaierror) else PROBE_REFUSED
        return PROBE_OK

    @property
    def stats(self) -> dict[str, int]:
        """Bytes that our calls moved, by transport, and how many peers did not permit cma."""
        with self._lock:
            refused = sum(peer.refused for peer in self._peers.values())
            return {**self._moved, "cma_refused": refused}

    # -- the end

    def close(self) -> None:
        """Our session is gone; what has been registered will not be touched any more."""
        if self.pid != os.getpid():
            return
        self._closed = True
        _engines.discard(self)
        if self._publication is not None:
            self._publication.close()
        self._submissions.close()
        self._endpoint.close()
        self.regions.close()
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()

    def abandon(self) -> None:
        """In a forked child: let go of the port and the streams, which are the parent's."""
        with contextlib.suppress(OSError, MooncakeError):
            self._endpoint.abandon()

    # -- peers

    def _reach(self, target: str, action: Callable[[Peer], _Result]) -> _Result:
        """What `action` of the peer gives; of the one that has its name now, if it is not where it was."""
        peer = self._peer(target)
        try:
            return action(peer)
        except UnreachedError as error:
            try:
                moved = self._names.resolve(target) != peer.address
            except TransferError as unknown:
                raise UnreachedError(f"{error}, and {unknown}") from error.__cause__
            if not moved:
                raise
        with self._lock:
            if self._peers.get(target) is peer:
                del self._peers[target]
        peer.close()
        return action(self._peer(target))

    def _peer(self, target: str) -> Peer:
        """Raises TransferError if `target` is no session name."""
        peer = self._peers.get(target)
        if peer is not None:
            return peer
        if self._closed:
            raise TransferError("this engine is closed")
        session, instance = self._names.resolve(target)
        try:
            made = Peer(
                session,
                self._hello,
                self._settings.limit,
                self._settings.force_tcp,
                self.regions.covers,
                self._endpoint.watch,
                instance,
            )
        except ValueError as error:
            raise TransferError(f"the peer's name: {error}") from None
        with self._lock:
            if len(self._peers) >= KNOWN_PEERS:
                for name in [name for name, known in self._peers.items() if known.unused]:
                    self._peers.pop(name).close()
            return self._peers.setdefault(target, made)


def _vectors(buffers: Sequence[int], addresses: Sequence[int], lengths: Sequence[int]) -> tuple[Pieces, Pieces]:
    """Raises TransferError for lists that do not match or name no memory.  Pieces of no bytes are left out."""
    if not len(buffers) == len(addresses) == len(lengths):
        raise TransferError(
            f"{len(buffers)} buffers, {len(addresses)} peer addresses and {len(lengths)} lengths differ"
        )
    count = len(lengths)
    try:  # fromiter takes lists of Python's integers faster than array does
        sizes = _lengths(lengths, count)
        local = Pieces(np.fromiter(buffers, np.int64, count), sizes)
        remote = Pieces(np.fromiter(addresses, np.int64, count), sizes)
    except OverflowError:
        raise TransferError("an address or a length has more than 63 bits") from None
    if not sizes.all():
        filled = sizes != 0
        local = Pieces(local.addresses[filled], local.lengths[filled])
        remote = Pieces(remote.addresses[filled], remote.lengths[filled])
    if len(local.lengths) and (local.lengths.min() < 0 or min(local.addresses.min(), remote.addresses.min()) <= 0):
        raise TransferError("an address is null or a length is negative")
    return local, remote


def _lengths(lengths: Sequence[int], count: int) -> Int64Array:
    """As an array; lists of one length, the most frequent ones, in a quarter of the time."""
    if count > 1 and isinstance(lengths, list) and lengths.count(lengths[0]) == count:
        return np.full(count, lengths[0], np.int64)
    return np.fromiter(lengths, np.int64, count)


def _abandon_all() -> None:
    for engine in list(_engines):
        engine.abandon()
    _engines.clear()
    cma.forget_helper()


os.register_at_fork(after_in_child=_abandon_all)
