"""`mooncake_master --enable_ha` until it is elected: its ports answer as a standby's, its candidate stands.

What was elected once and leads no longer becomes a standby again by running this program anew in its own process:
nothing of the old directory is left over, and every connection is closed at that moment.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Mapping
from typing import NoReturn

from mooncake.config_text import without_password
from mooncake.election.addresses import open_election
from mooncake.master.candidate import Candidate
from mooncake.master.flag_table import Value
from mooncake.master.ha_settings import election_text, published_address
from mooncake.master.reign import Reign
from mooncake.master.service import MasterService
from mooncake.master.standby import StandbyAdmin, StandbyPort
from mooncake.security.secret import read_admin_key, read_secret

logger = logging.getLogger(__name__)

_LOOK_S = 0.01


class Standing:
    """One candidacy."""

    def __init__(self, values: Mapping[str, Value], rpc_host: str, rpc_socket: socket.socket) -> None:
        """Raises ConfigError."""
        port = rpc_socket.getsockname()[1]
        self._address = published_address(rpc_host, port, values)
        self._elected: asyncio.Future[Reign] = asyncio.get_running_loop().create_future()
        where, self._cluster = election_text(values), str(values["cluster_id"])
        self._where = without_password(where)
        self._candidate = Candidate(open_election(where, self._cluster), self._address, self._on_elected)
        self._rpc_socket = rpc_socket
        self._reign: Reign | None = None

    async def wait(self, admin_socket: socket.socket, stopped: asyncio.Event) -> Reign | None:
        """Until elected; None: until stopped."""
        port, admin = StandbyPort(self._candidate), StandbyAdmin(self._candidate, read_admin_key(), read_secret())
        await port.start(self._rpc_socket.dup())
        await admin.start(admin_socket.dup())
        self._candidate.start()
        logger.info("Standby: %s is a candidate of cluster %s at %s", self._address, self._cluster, self._where)
        ended = asyncio.ensure_future(stopped.wait())
        try:
            await asyncio.wait((ended, self._elected), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            port.close()
            await admin.stop()
        if not self._elected.done():
            self._candidate.stop()
            return None
        self._reign = self._elected.result()
        logger.info("Elected: %s leads with term %d", self._reign.view.address, self._reign.view.term)
        return self._reign

    async def watch(self, service: MasterService, stopped: asyncio.Event) -> None:
        """Set `stopped` as soon as it leads no longer."""
        reign, loop = self._reign, asyncio.get_running_loop()
        assert reign is not None
        if service.directory.term != reign.view.term:
            reign.end("a snapshot is of a later term", service.directory.term)
        over = asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(over.set)

        reign.on_end = tell
        while reign.holds():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), max(reign.left_s, 0.0) + _LOOK_S)
        logger.warning("This master leads no longer: %s", reign.reason)
        stopped.set()

    async def resign(self) -> None:
        """Let another one be elected at once, if the back end can be told soon."""
        if self._reign is not None and not self._candidate.problem:
            await asyncio.get_running_loop().run_in_executor(None, self._candidate.resign, self._reign)

    def begin_anew(self) -> NoReturn:
        """Become a standby."""
        logger.info("Beginning anew as a standby")
        logging.shutdown()
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 -- no shell is wanted

    def _on_elected(self, reign: Reign) -> None:
        """In the candidate's thread."""
        loop = self._elected.get_loop()
        loop.call_soon_threadsafe(self._elected.set_result, reign)
