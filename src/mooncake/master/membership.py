"""Who is connected: clients by their id, however many connections each has."""

from __future__ import annotations

from mooncake.errors import ErrorCode, StoreError


class Client:
    """One client process.  `puts`: its open puts, by sequence number.  `scope`: of the tenant that names keys as it;
    None as long as only its segment server is there."""

    __slots__ = ("connections", "gone_at", "host", "name", "puts", "scope")

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.connections = 0
        self.gone_at = 0.0
        self.scope: str | None = None
        self.puts: set[int] = set()


class Clients:
    """Clients with a connection, and for a moment those that just lost their last one."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._known: dict[str, Client] = {}
        self._leaving: dict[str, Client] = {}  # in the order of gone_at

    def __len__(self) -> int:
        return len(self._known) - len(self._leaving)

    def arrive(self, name: str, host: str, scope: str | None = None) -> Client:
        """One more connection of `name`.  Raises StoreError if that is somebody of another tenant, whose puts it could
        end."""
        client = self._known.get(name)
        if client is None:
            client = self._known[name] = Client(name, host)
        if scope is not None:
            if client.scope not in (None, scope):
                raise StoreError(ErrorCode.ILLEGAL_CLIENT, "this client's id is that of another tenant's client")
            client.scope = scope
        client.connections += 1
        self._leaving.pop(name, None)
        return client

    def leave(self, client: Client, now: float) -> None:
        """One connection less."""
        client.connections -= 1
        if not client.connections:
            client.gone_at = now
            self._leaving[client.name] = client

    def gone(self, now: float) -> Client | None:
        """The next client that has been without a connection for too long; it is forgotten."""
        for client in self._leaving.values():
            if client.gone_at + self._grace > now:
                return None
            del self._leaving[client.name], self._known[client.name]
            return client
        return None
