"""Being in a pool: set-up, shutdown, registered memory.  What all families of calls of the store stand on."""

import contextlib
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from mooncake.errors import ErrorCode
from mooncake.store.setup import SetupError, open_client

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient

logger = logging.getLogger("mooncake.store")

INVALID = int(ErrorCode.INVALID_PARAMS)


class NotSetUpError(Exception):
    """The store was never set up, or is closed."""


class Member:
    """A store that has joined a pool, or not yet, or no longer."""

    def __init__(self) -> None:
        self._client: StoreClient | None = None
        self._buffer_size = 0
        self._lock = threading.Lock()

    # -- set-up and shutdown

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """Join the pool: setup(local_hostname, metadata_server, global_segment_size, local_buffer_size, protocol,
        rdma_devices, master_server_addr, engine=None, enable_ssd_offload=False, ssd_offload_path="",
        tenant_id="default", enable_client_http_server=False, client_http_port=9300), or setup(dict) with those names.

        Sizes are bytes (in the dict also text such as "64MB").  0, or a negative code; why is in the log.
        """
        with self._lock:
            self._leave()
            try:
                self._client = open_client(args, kwargs)
            except SetupError as error:
                logger.error("setup failed: %s", error)
                return int(error.code)
            self._buffer_size = self._client.config.buffer_size
        return 0

    def close(self) -> int:
        """Leave the pool; values in our own segment disappear at once, unless it lingers (docs/warm_pool.md).  0, also
        the second time."""
        with self._lock:
            self._leave()
        return 0

    def health_check(self) -> int:
        """0 healthy, 1 not set up or closed, 2 the master cannot be reached."""
        try:
            client = self._joined()
        except NotSetUpError:
            return 1
        return 0 if client.alive() else 2

    def get_hostname(self) -> str:
        """ "host:port", the name of this client and of its segment; "" before setup."""
        return self._client.name if self._client is not None else ""

    def transfer_stats(self) -> dict[str, int]:
        """Bytes moved so far by transport: "local" (our own segment), "shm" (same host), "tcp"."""
        return dict(self._client.attachments.moved) if self._client is not None else {}

    def read_stats(self) -> dict[str, int]:
        """Of `transfer_stats()`, what gets have brought."""
        return dict(self._client.attachments.read) if self._client is not None else {}

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Declare memory that later calls will name addresses in.  0; INVALID_PARAMS for null, empty, overlapping or
        unmapped ranges."""
        try:
            reason = self._joined().registered.add(buffer_ptr, size)
        except NotSetUpError:
            return INVALID
        if reason:
            logger.error("register_buffer: %s", reason)
            return INVALID
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Undo register_buffer of exactly this address."""
        try:
            return 0 if self._joined().registered.remove(buffer_ptr) else INVALID
        except NotSetUpError:
            return INVALID

    # -- inside

    def _joined(self) -> "StoreClient":
        client = self._client
        if client is None:
            raise NotSetUpError
        if client.pid != os.getpid():
            raise RuntimeError(
                f"this store was set up in process {client.pid} and is not usable in its forked child "
                f"{os.getpid()}; create and set up a new MooncakeDistributedStore here"
            )
        return client

    def _leave(self) -> None:
        client, self._client = self._client, None
        self._buffer_size = 0
        if client is not None and client.pid == os.getpid():
            client.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self._leave()
