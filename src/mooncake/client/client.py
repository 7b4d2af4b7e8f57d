"""The store client: one process's membership in a pool.  Thread-safe and blocking; has no event loop of its own."""

import logging
import os
from typing import TYPE_CHECKING, Protocol

from mooncake.client.attachments import Attachments
from mooncake.client.checks import Checks
from mooncake.client.disk import DiskReads
from mooncake.client.get import GetPipeline
from mooncake.client.leases import LeaseReturns
from mooncake.client.meter import Meter
from mooncake.client.mounts import Mounts
from mooncake.client.put import PutPipeline
from mooncake.client.registered import RegisteredMemory
from mooncake.client.session import Session
from mooncake.client.sessions import GetSessions, PutSessions
from mooncake.errors import StoreError
from mooncake.rpc.messages import Codes, Ping
from mooncake.transfer.pieces import Pieces
from mooncake.transfer.shm import ShmTransport

if TYPE_CHECKING:
    from mooncake.client.http import ClientHttpServer
    from mooncake.client.reports import Reports
    from mooncake.rpc.segment_messages import Family

logger = logging.getLogger("mooncake.client")


class Registry(Protocol):
    """What has been registered elsewhere; as RegisteredMemory says it."""

    def covers(self, pieces: Pieces, write: bool) -> bool: ...

    def contains(self, pieces: Pieces) -> bool: ...


class StoreClient:
    """Built on a Session; `close` undoes both.  `engine`: a transfer engine of this process, whose registered memory
    counts as registered here."""

    def __init__(self, session: Session, engine: Registry | None = None) -> None:
        assert session.rpc is not None
        self.config = session.config
        self.name = session.name
        self.rpc = session.rpc
        self.pid = os.getpid()
        self._session = session
        self._http: ClientHttpServer | None = None
        self._reports: Reports | None = None
        self.registered = RegisteredMemory()
        self.meter = Meter()
        self._engine = engine
        self.attachments = Attachments(self.rpc, session.hello, self.config.force_tcp, self.config.transfer_limit)
        self.mounts = Mounts(session, self.attachments)
        checks = Checks(self.config.checksum)
        self.puts = PutPipeline(self.rpc, self.attachments, session.client_id, self.meter, checks)
        self._returns = LeaseReturns(self.rpc)
        self.disks = DiskReads(self.attachments, session.hello, self.config.transfer_limit)
        self.gets = GetPipeline(self.rpc, self.attachments, self._returns, self.disks, self.meter, checks)
        self.put_sessions = PutSessions(self.puts)
        self.get_sessions = GetSessions(self.gets)
        if session.server is not None:
            serving, memory = session.server.wait()
            self.attachments.add_own(serving.info, ShmTransport(memory, serving.writer, None))
        if self.config.counts and self.config.report_interval > 0:
            self._report(self.config.report_interval)

    def alive(self) -> bool:
        """Whether the master answers now."""
        try:
            self.rpc.call(Ping(), Codes)
        except StoreError:
            return False
        return True

    def covers(self, pieces: Pieces, write: bool) -> bool:
        """Whether every piece lies in registered, mapped host memory (writable if `write`)."""
        engine = self._engine
        return self.registered.covers(pieces, write) or (engine is not None and engine.covers(pieces, write))

    def contains(self, pieces: Pieces) -> bool:
        """Whether every piece lies in registered memory."""
        return self.registered.contains(pieces) or (self._engine is not None and self._engine.contains(pieces))

    def serve_http(self, port: int) -> None:
        """Answer health and metrics requests on `port`.  Raises ConfigError."""
        from mooncake.client.http import ClientHttpServer

        self._http = ClientHttpServer(port, self.alive, self._families)
        self._count()

    def _report(self, interval: int) -> None:
        from mooncake.client.reports import Reports

        self._count()
        self._reports = Reports(interval, self._families)
        self._reports.start()

    def _count(self) -> None:
        if self.config.counts:
            self.meter.on = True
            self.rpc.on_call = self.meter.called

    def _families(self) -> "list[Family]":
        return self.meter.families(self)

    def close(self) -> None:
        """Leave the pool: our own segment is unmounted, its values disappear at once, unless it lingers."""
        if self._http is not None:
            self._http.close()
        if self._reports is not None:
            self._reports.close()
        self.mounts.close()
        if self._session.server is not None:
            self._session.server.close()
        self._returns.close()
        self.disks.close()
        self.attachments.close()
        self._session.close()
        self.registered.clear()
