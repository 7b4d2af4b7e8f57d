"""`python -m mooncake.vllm_v1_proxy_server`: the flags of the C++ wheel's proxy, and `mooncake_proxy` behind them.

Prefill runs first, and what it returns in `kv_transfer_params` goes into decode's request.
"""

import sys

from mooncake.cli import proxy
from mooncake.cli.arguments import Parser, whole
from mooncake.errors import ConfigError

PROGRAM = "vllm_v1_proxy_server"


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description="Serve OpenAI's API through prefill and decode instances; mooncake_proxy has more flags.",
    )
    add = parser.add_argument
    add("--port", type=whole, default=8000, help="port to listen on, 0 for any (default %(default)s)")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    for role, port in (("prefiller", 8100), ("decoder", 8200)):
        add(f"--{role}-hosts", f"--{role}-host", nargs="+", default=["localhost"], metavar="HOST",
            help="one for each port, or one for all (default localhost)")  # fmt: skip
        add(f"--{role}-ports", f"--{role}-port", nargs="+", type=whole, default=[port], metavar="PORT",
            help=f"(default {port})")  # fmt: skip
    return parser


def _urls(role: str, hosts: list[str], ports: list[int]) -> list[str]:
    """Raises ConfigError unless there is one host, or one for each port."""
    if len(hosts) == 1:
        hosts = hosts * len(ports)
    if len(hosts) != len(ports):
        raise ConfigError(
            f"--{role}-hosts names {len(hosts)} and --{role}-ports {len(ports)}: "
            "expected one host for each port, or one for all."
        )
    return [f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port in zip(hosts, ports, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        prefill = _urls("prefiller", options.prefiller_hosts, options.prefiller_ports)
        decode = _urls("decoder", options.decoder_hosts, options.decoder_ports)
    except ConfigError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    flags = ["--host", options.host, "--port", str(options.port), "--connector", "store"]
    for url in prefill:
        flags += ["--prefill", url]
    for url in decode:
        flags += ["--decode", url]
    return proxy.main(flags)


if __name__ == "__main__":
    sys.exit(main())
