"""`mooncake warm`: the segment servers of this user that wait on this host for an engine to come back."""

import argparse
import os
import secrets
from typing import Any, NamedTuple, cast

import msgspec

from mooncake.errors import ConfigError, StoreError
from mooncake.rpc.client import Connection
from mooncake.rpc.frame import FramingError
from mooncake.rpc.messages import PROTOCOL, Hello
from mooncake.rpc.segment_messages import LingerQuery, Lingers
from mooncake.rpc.serving_messages import Stop
from mooncake.rpc.sockets import set_time_limit
from mooncake.transfer.host import host_id
from mooncake.transfer.warm_sockets import connect, waiting
from mooncake.version import __version__

LIMIT = 2.0  # seconds
_ALL = "all"


class _Waiting(NamedTuple):
    connection: Connection
    says: Lingers


def add_parser(commands: Any) -> None:
    """Describe the subcommand to argparse."""
    parser = commands.add_parser(
        "warm",
        help="list, or end, segment servers that wait for their engine to come back",
        description="Lists the segment servers on this host that have outlived their engine "
        "(MOONCAKE_SEGMENT_LINGER_S), with the values in them. Those of other users are not seen, nor those in other "
        "network namespaces.",
    )
    parser.add_argument(
        "--end", metavar="NAME", help="end the server of this segment, or 'all': its values leave the pool at once"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 1 if what is to be ended is not there."""
    servers = _find()
    try:
        if options.end is None:
            _print([server.says for server in servers])
            return 0
        chosen = [server for server in servers if options.end in (_ALL, server.says.name)]
        if not chosen and options.end != _ALL:
            raise ConfigError(
                f"no segment server named {options.end!r} waits here; `mooncake warm` lists those that do"
            )
        for server in chosen:
            server.connection.call(Stop())
            print(f"{server.says.name}: ended")
        return 0
    finally:
        for server in servers:
            server.connection.close()


def _find() -> list[_Waiting]:
    hello = Hello(PROTOCOL, __version__, "client", f"{secrets.randbits(64)}-0", host_id())
    found = []
    for address in waiting(os.environ.get("MC_SHM_SOCKET_DIR", "")):
        try:
            connection = Connection(connect(address))
        except OSError:
            continue  # it has ended, or an engine has come
        try:
            set_time_limit(connection.sock, LIMIT)
            connection.greet(hello)
            found.append(_Waiting(connection, cast(Lingers, connection.call(LingerQuery()))))
        except StoreError as error:
            connection.close()
            raise ConfigError(f"a segment server does not answer this user: {error}") from None
        except (OSError, FramingError, msgspec.MsgspecError):
            connection.close()
    return found


def _print(servers: list[Lingers]) -> None:
    if not servers:
        print("no segment server waits here")
        return
    print(f"{'segment':<32}{'MiB':>10}{'seconds left':>14}{'process':>10}")
    for server in servers:
        print(f"{server.name:<32}{server.size >> 20:>10}{server.left_ms // 1000:>14}{server.pid:>10}")
