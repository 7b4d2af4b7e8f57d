"""Asking the directory how far lists of keys reach, without being a member of the pool: for schedulers of engines.

Owns a connection or two to the master, and nothing else: no segment, no registered memory, no numpy.
"""

import secrets

from mooncake.election.places import master_place
from mooncake.rpc.client import Client
from mooncake.rpc.messages import PROTOCOL, Count, Hello, Need, Prefix, PrefixReply, RemoveRegex
from mooncake.transfer.host import host_id
from mooncake.version import __version__


class PrefixClient:
    """Thread-safe.  Connects with the first call; each call ends within `limit` seconds a round trip.  The keys are
    those of `tenant`, if the master has tenants.  Raises ConfigError for an impossible address."""

    def __init__(self, master: str, limit: float, tenant: str = "default") -> None:
        client = f"{secrets.randbits(64)}-{secrets.randbits(64)}"
        hello = Hello(PROTOCOL, __version__, "client", client, host_id(), tenant=tenant)
        self._rpc = Client(master_place(master), hello, limit)

    @property
    def down(self) -> bool:
        """Whether the master was found down and has not answered since: calls fail at once."""
        return self._rpc.down

    def lengths(self, heads: list[str], tails: list[list[str]]) -> list[int]:
        """For each list of `tails`, how many of its first entries are in the pool with every head; they are under a
        probe lease now.  Raises StoreError."""
        return self.places([Need(heads)], tails, 1)

    def places(self, needs: list[Need], tails: list[list[str]], step: int) -> list[int]:
        """For each list of `tails`, the greatest multiple of `step` up to which all that `needs` say is there; that is
        under a probe lease now.  Raises StoreError."""
        return self._rpc.call(Prefix(needs, tails, step), PrefixReply).lengths

    def remove(self, pattern: str) -> int:
        """Remove every key in which `pattern` is found, leased or not; how many.  Raises StoreError."""
        return self._rpc.call(RemoveRegex(pattern, True), Count).count

    def close(self) -> None:
        self._rpc.close()
