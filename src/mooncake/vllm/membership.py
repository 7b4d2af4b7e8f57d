"""A worker's membership in the pool: joined when the engine starts, or later, once the master can be reached."""

import logging
import threading
from collections.abc import Mapping
from typing import Any

from mooncake.election.places import master_place
from mooncake.errors import ConfigError
from mooncake.mooncake_config import MooncakeConfig
from mooncake.rpc.client import CONNECT_LIMIT
from mooncake.rpc.place import is_reachable
from mooncake.store import MooncakeDistributedStore

logger = logging.getLogger("vllm.mooncake")

_RETRY = 2.0  # seconds between two attempts to join


class Membership:
    """`store` is None until the pool has been joined."""

    def __init__(self, config: MooncakeConfig, regions: Mapping[int, int]) -> None:
        """`regions`: address → bytes of the memory that blocks lie in.  Raises ConfigError if this will never work."""
        self._config = config
        self._regions = regions
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.store: Any = None
        if not self._join():
            if _reachable(config.master_server_address):
                raise ConfigError(
                    f"the pool at {config.master_server_address} cannot be joined; the line before says why "
                    "(logger mooncake.store)"
                )
            logger.warning(
                "The master at %s cannot be reached; the engine starts without the pool, and joins it when it can",
                config.master_server_address,
            )
            self._thread = threading.Thread(target=self._keep_trying, name="mooncake-join", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(5)
        store, self.store = self.store, None
        if store is not None:
            store.close()

    def _join(self) -> bool:
        config = self._config
        store = MooncakeDistributedStore()
        code = store.setup(
            config.local_hostname,
            config.metadata_server,
            config.global_segment_size,
            config.local_buffer_size,
            config.protocol,
            config.device_name or "",
            config.master_server_address,
            tenant_id=config.tenant_id,
        )
        if code:
            return False
        for address, size in self._regions.items():
            if store.register_buffer(address, size):
                store.close()
                raise ConfigError(
                    f"the KV cache ({size} bytes at {address:#x}) cannot be registered; the line before says why "
                    "(logger mooncake.store)"
                )
        self.store = store
        return True

    def _keep_trying(self) -> None:
        while not self._closed.wait(_RETRY):
            if _reachable(self._config.master_server_address):
                try:
                    if self._join():
                        logger.info("The pool at %s has been joined", self._config.master_server_address)
                        return
                except ConfigError as error:
                    logger.error("%s", error)
                    return


def _reachable(address: str) -> bool:
    try:
        place = master_place(address)
    except ConfigError:
        return False
    return is_reachable(place, CONNECT_LIMIT)
