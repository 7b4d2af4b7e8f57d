"""A blocking connection to a master or a segment server, for tests that say what no client would say."""

from mooncake.rpc.client import Connection
from mooncake.rpc.messages import PROTOCOL, GetStart, Hello, SegmentInfo, SegmentQuery
from mooncake.rpc.sockets import connect, set_time_limit


def greeted(port: int, role: str = "client", client: str = "1-1", host: str = "elsewhere") -> Connection:
    connection = Connection(connect("127.0.0.1", port, 1))
    set_time_limit(connection.sock, 5)
    connection.greet(Hello(PROTOCOL, "test", role, client, host))
    return connection


def segments(connection: Connection, key: str) -> list[SegmentInfo]:
    """Where a value's first replica lies."""
    found = connection.call(GetStart([key])).found[0]
    return connection.call(SegmentQuery(sorted(set(found.places[0][::3])))).segments
