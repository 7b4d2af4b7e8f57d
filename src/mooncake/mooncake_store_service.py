"""`mc_store_rest_server`: a store behind HTTP, for programs that have no client library.

The routes are mooncake.rest's; here are the command, its settings, its start and its end.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

from mooncake.cli.arguments import Parser
from mooncake.cli.listening import bind, no_port
from mooncake.errors import ConfigError
from mooncake.installed_once import refuse_if_cpp_installed
from mooncake.mooncake_config import MooncakeConfig
from mooncake.rpc.descriptors import allow_many
from mooncake.security.secret import read_secret, warn_if_exposed
from mooncake.version import __version__

logger = logging.getLogger("mooncake.rest")

PROGRAM = "mc_store_rest_server"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 (where the system has it)
RETRY = 1.0  # seconds between two tries to join the pool
CALLS = 32  # store calls at once; more wait


class MooncakeStoreService:
    """A store and its HTTP server: `start` joins the pool, `serve` answers until told to stop."""

    def __init__(self, config: MooncakeConfig, directories: list[str]) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.config = config
        self._directories = directories
        self.store = MooncakeDistributedStore()
        self._calls = ThreadPoolExecutor(CALLS, thread_name_prefix="mooncake-rest")

    async def start(self, max_wait_time: float, stopped: asyncio.Event) -> bool:
        """Join the pool, trying for up to `max_wait_time` seconds.  False: `stopped` was set meanwhile.  Raises
        ConfigError."""
        config = self.config
        settings = {
            "local_hostname": config.local_hostname,
            "metadata_server": config.metadata_server,
            "global_segment_size": config.global_segment_size,
            "local_buffer_size": config.local_buffer_size,
            "protocol": config.protocol,
            "rdma_devices": config.device_name or "",
            "master_server_addr": config.master_server_address,
            "enable_ssd_offload": config.enable_ssd_offload,
            "ssd_offload_path": config.ssd_offload_path,
            "tenant_id": config.tenant_id,
            "enable_client_http_server": config.enable_client_http_server,
            "client_http_port": config.client_http_port,
        }
        give_up = time.monotonic() + max_wait_time
        while not stopped.is_set():
            try:
                code = await asyncio.get_running_loop().run_in_executor(self._calls, self.store.setup, settings)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            if code == 0:
                return not stopped.is_set()
            if time.monotonic() + RETRY >= give_up:
                raise ConfigError(
                    f"The pool could not be joined within {max_wait_time:g} s (the last try ended with {code}; the log "
                    "above says why): start mooncake_master, or correct the configuration."
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), RETRY)
        return False

    async def serve(self, listening: socket.socket, stopped: asyncio.Event) -> None:
        """Answer until `stopped`, on a bound socket."""
        from mooncake.rest.server import RestServer

        server = RestServer(self.store, self.config.protocol, self._directories, self._calls)
        host, port = listening.getsockname()[:2]
        try:
            await server.start(listening)
        except OSError as error:
            raise no_port(host, port, error) from None
        logger.info("REST API of %s on http://%s:%d", self.store.get_hostname(), host, port)
        await stopped.wait()
        await server.stop()

    def close(self) -> None:
        """Leave the pool, with the segments that were contributed."""
        self._calls.shutdown(cancel_futures=True)
        self.store.close()


def sync_main() -> int:
    """The command; returns its exit status."""
    return main()


def main(arguments: list[str] | None = None) -> int:
    """As sync_main, with arguments."""
    try:
        refuse_if_cpp_installed()
        options = _parser().parse_args(arguments)
        logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(asctime)s %(name)s: %(message)s")
        allow_many()
        config = _configuration(options.config, options.define)
        warn_if_exposed(logger, "this REST service", options.host, read_secret())
        service = MooncakeStoreService(config, [SHARED_MEMORY, *options.segment_dir])
        asyncio.run(_run(service, bind(options.host, options.port), options.max_wait_time))
    except (ConfigError, ImportError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(service: MooncakeStoreService, listening: socket.socket, max_wait_time: float) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    with contextlib.closing(listening):
        try:
            if await service.start(max_wait_time, stopped):
                await service.serve(listening, stopped)
        finally:
            await loop.run_in_executor(None, service.close)


def _configuration(path: str | None, defined: list[str]) -> MooncakeConfig:
    """The file's or the environment's, with what -D says instead.  Raises ConfigError."""
    config = MooncakeConfig.from_file(path) if path else MooncakeConfig.load_from_env()
    known = [field.name for field in fields(MooncakeConfig)]
    changes: dict[str, str] = {}
    for text in defined:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or name not in known:
            raise ConfigError(f"-D {text} is not key=value with one of the keys {', '.join(known)}.")
        changes[name] = value
    return replace(config, **changes)  # type: ignore[arg-type]  # texts become what the fields hold


def _port(text: str) -> int:
    if not text.isdecimal() or not int(text) < 65536:
        raise argparse.ArgumentTypeError(f'expected a port from 0 to 65535, but found "{text}"')
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f'expected seconds, 0 or more, but found "{text}"')
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="Serve a pool of KV cache over HTTP.")
    add = parser.add_argument
    add("--config", help="the client's configuration, a JSON file (default: $MOONCAKE_CONFIG_PATH, $MOONCAKE_...)")
    add(
        "-D",
        "--define",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="instead of what the configuration has for KEY; may be given again",
    )
    add("--port", type=_port, default=8080, help="port to listen on, 0 for any (default %(default)s)")
    add("--host", default="0.0.0.0", help="address to listen on (default %(default)s)")
    add(
        "--segment-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="segments may lie in files under DIR too, not only under /dev/shm; may be given again",
    )
    add("--max-wait-time", type=_seconds, default=60, help="seconds to wait for the pool (default %(default)s)")
    add("--version", action="version", version=f"{PROGRAM} version {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(sync_main())
