"""`mooncake_http_metadata_server`: the metadata service of transfer engines as a process, or as a thread of another.

Everything is kept in memory.  A restart loses nothing for long: engines publish themselves again within seconds.
"""

import argparse
import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable

from mooncake.cli.arguments import Parser
from mooncake.cli.listening import listen
from mooncake.errors import ConfigError
from mooncake.installed_once import refuse_if_cpp_installed
from mooncake.metadata.server import Dialect, MetadataServer
from mooncake.rpc.descriptors import allow_many
from mooncake.version import __version__

logger = logging.getLogger("mooncake.metadata")

PROGRAM = "mooncake_http_metadata_server"
START_LIMIT = 10.0  # seconds
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class KVBootstrapServer:
    """The server in a thread: `run` starts it, `poll` says whether it serves, `close` ends it."""

    def __init__(self, port: int, host: str = "0.0.0.0") -> None:
        self._port, self._host = port, host
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped: asyncio.Event | None = None

    @property
    def port(self) -> int:
        """Where it listens; other than the one asked for if that was 0."""
        return self._port

    def run(self) -> None:
        """Returns once it serves.  Raises ConfigError if it cannot listen."""
        listening = listen(self._host, self._port)
        self._port = listening.getsockname()[1]
        started = threading.Event()

        async def serve() -> None:
            self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
            await _serve(listening, self._stopped, started.set)

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), name=PROGRAM, daemon=True)
        self._thread.start()
        started.wait(START_LIMIT)

    def poll(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._stopped is None:
            return
        self._loop.call_soon_threadsafe(self._stopped.set)
        thread.join(5)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    try:
        refuse_if_cpp_installed()
        options = _parser().parse_args(arguments)
        logging.basicConfig(level=options.log_level, format="%(levelname).1s %(asctime)s %(name)s: %(message)s")
        allow_many()
        listening = listen(options.host, options.port)
    except (ConfigError, ImportError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    asyncio.run(_until_signalled(listening))
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or not int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; expected a number from 0 to 65535")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="Keep the addresses of transfer engines.")
    parser.add_argument("--port", type=_port, default=8080, help="port to listen on, 0 for any (default %(default)s)")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default %(default)s)")
    parser.add_argument("--log-level", type=str.upper, choices=LEVELS, default="INFO", help="default %(default)s")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} version {__version__}")
    return parser


async def _until_signalled(listening: socket.socket) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    host, port = listening.getsockname()[:2]
    await _serve(listening, stopped, lambda: logger.info("serving on http://%s:%d/metadata", host, port))


async def _serve(listening: socket.socket, stopped: asyncio.Event, started: Callable[[], None]) -> None:
    server = MetadataServer(Dialect.STANDALONE)
    await server.start(listening)
    started()
    await stopped.wait()
    await server.stop()


if __name__ == "__main__":
    sys.exit(main())
