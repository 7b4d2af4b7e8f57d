"""`mooncake_conductor`: the indexer of KV caches, until SIGINT or SIGTERM."""

import asyncio
import logging
import signal
import socket
import sys

from mooncake.cli.arguments import Parser, whole
from mooncake.cli.listening import listen
from mooncake.errors import ConfigError
from mooncake.indexer.config import DEFAULT_PATH, DEFAULT_PORT, IndexerConfig, read_config
from mooncake.installed_once import refuse_if_cpp_installed
from mooncake.security.secret import warn_if_exposed
from mooncake.version import __version__

logger = logging.getLogger("mooncake.indexer")


def main() -> int:
    """Returns the exit code: 0 after SIGINT or SIGTERM, 1 if it could not start."""
    parser = Parser(
        prog="mooncake_conductor",
        description="Follow the KV events of engines and pools, and say who has how much of a prompt.",
        epilog="Environment: CONDUCTOR_CONFIG_PATH, CONDUCTOR_LOG_LEVEL (DEBUG, INFO, WARNING, ERROR), CONDUCTOR_SEED.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=whole, help=f"port, 0 for any (default: http_server_port, {DEFAULT_PORT})")
    parser.add_argument("--config", help=f"JSON file (default: $CONDUCTOR_CONFIG_PATH, then {DEFAULT_PATH})")
    parser.add_argument("--version", action="version", version=f"mooncake_conductor version {__version__}")
    options = parser.parse_args()
    try:
        refuse_if_cpp_installed()
        config = read_config(options.config, options.port)
        logging.basicConfig(level=config.log_level, format="%(levelname).1s %(asctime)s %(name)s: %(message)s")
        listening = listen(options.host, config.port)
        asyncio.run(_serve(config, listening))
    except (ConfigError, ImportError) as error:
        print(f"mooncake_conductor: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: IndexerConfig, listening: socket.socket) -> None:
    from mooncake.indexer.service import Indexer

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    indexer = Indexer(config)
    warn_if_exposed(logger, "this indexer", listening.getsockname()[0], indexer.secret)
    try:
        await indexer.start(listening)
    except ValueError as error:
        raise ConfigError(f"An instance of the configuration file cannot be followed: {error}.") from None
    logger.info("serving on http://%s:%d", *listening.getsockname()[:2])
    await stopped.wait()
    await indexer.stop()


if __name__ == "__main__":
    sys.exit(main())
