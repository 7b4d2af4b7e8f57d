"""Handing read leases back: with the next request to the master, or by themselves within milliseconds."""

import os
import threading

from mooncake.rpc import frame
from mooncake.rpc.client import Client
from mooncake.rpc.messages import KINDS, LeaseReturn, encode

DELAY = 0.01  # seconds that a lease may wait for a request to travel with


class LeaseReturns:
    """Leases whose copies are finished and of which the master has not been told yet."""

    def __init__(self, rpc: Client) -> None:
        self._rpc = rpc
        self._leases: list[int] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._owner = 0  # the process in which the thread runs
        self._closed = False
        rpc.on_one_way = self.take

    def give(self, lease: int) -> None:
        """This lease's copies are finished.  Costs the caller no system call: beside a busy thread each would cost
        a switch interval of the interpreter."""
        with self._lock:
            self._leases.append(lease)
        if not self._wake.is_set():
            if self._owner != os.getpid():
                self._owner = os.getpid()
                threading.Thread(target=self._run, name="mooncake-lease-returns", daemon=True).start()
            self._wake.set()

    def take(self) -> bytes:
        """The frame that hands all of them back, to be sent by the caller."""
        if not self._leases:
            return b""
        with self._lock:
            leases, self._leases = self._leases, []
        return frame.pack(KINDS[LeaseReturn], frame.ONE_WAY, 0, encode(LeaseReturn(leases)))

    def close(self) -> None:
        """Hand back what is left, and end the thread."""
        self._closed = True
        self._wake.set()
        self._rpc.send(self.take())

    def _run(self) -> None:
        while True:
            self._wake.wait()
            if self._closed:
                return
            threading.Event().wait(DELAY)
            self._wake.clear()
            if self._closed:  # `close` may have come just before `clear`
                return
            self._rpc.send(self.take())
