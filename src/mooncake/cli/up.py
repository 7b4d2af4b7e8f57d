"""`mooncake up`: a pool on this host in one command.

Starts a master and a segment server on loopback ports, says how Python and vLLM use them, and runs until SIGINT or
SIGTERM.  Its only files lie in one temporary folder that goes with it.
"""

import argparse
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from mooncake.cli.arguments import whole
from mooncake.cli.children import Children, Interrupted, own_command
from mooncake.cli.engine_settings import (
    CONSUMER,
    PRODUCER,
    p2p_and_pool_config,
    p2p_environment,
    pool_environment,
    transfer_config,
    write_pool_config,
)
from mooncake.cli.loopback import HOST, accepts, fetch, free_ports, is_free, metric
from mooncake.config_text import parse_size
from mooncake.errors import ConfigError
from mooncake.installed_once import refuse_if_cpp_installed
from mooncake.transfer.memory import available_memory

DEFAULT_SIZE = "2GB"
_START_LIMIT = 20.0  # seconds
_MIB = 1 << 20
_MIN_SIZE = 16 * _MIB
_MOST_INSTANCES = 64


def add_parser(commands: Any) -> None:
    """Describe the subcommand to argparse."""
    parser = commands.add_parser(
        "up",
        help="start a pool on this host and say how to use it",
        description="Starts a master and a segment server on loopback ports, prints how Python and vLLM use them, "
        "and runs until Ctrl-C.",
    )
    parser.add_argument(
        "--size", default=DEFAULT_SIZE, help="memory of the pool, such as 512MB or 1.5GB (default: %(default)s)"
    )
    parser.add_argument("--port", type=whole, default=0, help="the master's port (default: a free one)")
    parser.add_argument("--metrics-port", type=whole, default=0, help="its HTTP port (default: a free one)")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            type=whole,
            metavar="N",
            help=f"print the lines of N {role} instances of vLLM and of a proxy, instead of one instance that does all",
        )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Returns after SIGINT or SIGTERM; raises ChildFailed when a server does not start or ends by itself."""
    refuse_if_cpp_installed()
    size = _size(arguments.size)
    port = _port("--port", arguments.port)
    metrics_port = _port("--metrics-port", arguments.metrics_port)
    if port == metrics_port:
        raise ConfigError(f"--port and --metrics-port are both {port}; give one of them another port.")
    split = _split(arguments.prefill, arguments.decode)
    try:
        with tempfile.TemporaryDirectory(prefix="mooncake-up-") as name, Children(folder := Path(name)) as children:
            _start(children, folder, port, metrics_port, size)
            config = folder / "vllm.json"
            write_pool_config(config, port, segment_size=0)
            print(how_to_use(port, metrics_port, size, split_lines(config, *split) if split else lines(config)))
            print("\nCtrl-C stops the pool and drops what it holds.", flush=True)
            children.watch()
    except Interrupted:
        return 0
    return 1


def _start(children: Children, folder: Path, port: int, metrics_port: int, size: int) -> None:
    master = children.start(
        "the master",
        own_command(
            "mooncake.cli.master",
            *(f"--rpc_address={HOST}", f"--rpc_port={port}"),
            *(f"--metrics_host={HOST}", f"--metrics_port={metrics_port}", "--logtostderr"),
        ),
        folder / "master.log",
    )
    children.wait_ready(master, lambda: accepts(port) and fetch(metrics_port, "/health") is not None, _START_LIMIT)
    server = children.start(
        "the segment server",
        own_command(
            "mooncake.cli.client",
            *(f"--host={HOST}", f"--port={free_ports(1)[0]}", f"--master_server_address={HOST}:{port}"),
            *("--metadata_server=P2PHANDSHAKE", "--protocol=tcp", f"--global_segment_size={size}"),
        ),
        folder / "segment.log",
    )
    children.wait_ready(server, lambda: _capacity(metrics_port) > 0, _START_LIMIT)


def _capacity(metrics_port: int) -> float:
    return metric(fetch(metrics_port, "/metrics") or "", "master_total_capacity_bytes")


def how_to_use(port: int, metrics_port: int, size: int, vllm: str) -> str:
    """The lines that the user copies; plain text, nothing is wrapped."""
    return f"""\
A pool of {size / (1 << 30):.4g} GiB is up: master {HOST}:{port}, metrics http://{HOST}:{metrics_port}/metrics

Python:
  from mooncake.store import MooncakeDistributedStore
  store = MooncakeDistributedStore()
  store.setup("{HOST}", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", "{HOST}:{port}")
  store.put("greeting", b"hello"); print(store.get("greeting"))

{vllm}"""


def lines(config: Path) -> str:
    """How to start an instance that does all."""
    first, second = free_ports(2)
    return f"""\
vLLM (every instance on a host needs another lookup_rpc_port; {second} is free for a second one):
  export {_exported(pool_environment(config))}
  vllm serve MODEL --kv-transfer-config '{transfer_config(first)}'"""


def split_lines(config: Path, prefill: int, decode: int) -> str:
    """How to start so many instances of each role, and the proxy in front of them."""
    made = ["vLLM and the proxy, each in a terminal of its own, where the first line goes ahead:"]
    made.append(f"  export {_exported({**pool_environment(config), **p2p_environment(None)})}")
    ports = iter(free_ports(1 + 3 * (prefill + decode)))
    proxy = f"  mooncake_proxy --port {next(ports)}"
    for role, flag, count in ((PRODUCER, "--prefill", prefill), (CONSUMER, "--decode", decode)):
        for _ in range(count):
            port, lookup, bootstrap = islice(ports, 3)
            own = f"VLLM_MOONCAKE_BOOTSTRAP_PORT={bootstrap} " if role == PRODUCER else ""
            transfer = p2p_and_pool_config(role, lookup)
            made.append(f"  {own}vllm serve MODEL --port {port} --kv-transfer-config '{transfer}'")
            proxy += f" {flag} http://{HOST}:{port}" + (f" {bootstrap}" if role == PRODUCER else "")
    return "\n".join([*made, proxy])


def _exported(environment: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in environment.items())


def _split(prefill: int | None, decode: int | None) -> tuple[int, int] | None:
    """So many of each, one where only the other was asked for; None if neither was."""
    for flag, count in (("--prefill", prefill), ("--decode", decode)):
        if count is not None and not 0 < count <= _MOST_INSTANCES:
            raise ConfigError(f"{flag} must be a number from 1 to {_MOST_INSTANCES}, but is {count}.")
    return None if prefill is decode is None else (prefill or 1, decode or 1)


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--size: {error}.") from None
    if size < _MIN_SIZE:
        raise ConfigError(f"--size must be at least {_MIN_SIZE // _MIB}MB, but is {text}.")
    if size > (available := available_memory()):
        raise ConfigError(
            f"--size is {text}, but this host has only {available // _MIB} MiB of memory left; give less."
        )
    return size


def _port(flag: str, port: int) -> int:
    if not port:
        return free_ports(1)[0]
    if not 0 < port < 65536:
        raise ConfigError(f"{flag} must be a port number from 1 to 65535, but is {port}.")
    if not is_free(port):
        raise ConfigError(f"{flag}: another program listens on port {port} of {HOST}; choose another one.")
    return port
