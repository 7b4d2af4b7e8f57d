"""Metrics in the log, at intervals, for who has no Prometheus (MC_STORE_CLIENT_METRIC_INTERVAL)."""

import logging
import threading
from collections.abc import Callable

from mooncake.rpc.figures import summary
from mooncake.rpc.segment_messages import Family

logger = logging.getLogger("mooncake.client")


class Reports(threading.Thread):
    """A summary of `families` each `interval` seconds, until `close`."""

    def __init__(self, interval: int, families: Callable[[], list[Family]]) -> None:
        super().__init__(name="mooncake-metric-reports", daemon=True)
        self._interval = interval
        self._families = families
        self._closed = threading.Event()

    def run(self) -> None:
        while not self._closed.wait(self._interval):
            logger.info("%s", summary(self._families()).rstrip())

    def close(self) -> None:
        self._closed.set()
        self.join()
