"""`mooncake doctor`: what is wrong with a pool, its host and its instances, and what to do about it."""

import argparse
import os
from typing import Any

from mooncake.cli.arguments import whole
from mooncake.config_text import environment_whole, parse_size, read_mapping
from mooncake.errors import ConfigError

_DEFAULT_METRICS_PORT = 9003


def add_parser(commands: Any) -> None:
    """Describe the subcommand to argparse."""
    parser = commands.add_parser(
        "doctor",
        help="find out why a pool does not work, or why instances do not share it",
        description="Looks at this host, at a pool and at vLLM instances, and says what is wrong and what to do. "
        "Changes nothing. The exit code is 1 if anything does not work.",
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="the pool's JSON file (default: $MOONCAKE_CONFIG_PATH, if set)")
    add(
        "--master",
        metavar="HOST:PORT",
        help="the master, or etcd://, redis://, k8s:// to find it, instead of the one in the file "
        "(default: $MOONCAKE_MASTER)",
    )
    add("--metrics-port", type=whole, metavar="PORT",
        help="of the master's HTTP interface (default: $MOONCAKE_MASTER_METRICS_PORT, else 9003)")  # fmt: skip
    add("--instance", action="append", default=[], metavar="URL",
        help="a vLLM instance of the pool, such as http://host:8000; repeatable")  # fmt: skip
    add("--proxy", action="append", default=[], metavar="URL", help="a mooncake_proxy; its instances are looked at too")
    add("--port", action="append", type=whole, default=[], metavar="PORT",
        help="a port of this host: is it free, and who has it? repeatable (default: those of a pool)")  # fmt: skip
    add("--timeout", type=_seconds, default=2.0, metavar="S", help="of one question over the network (default 2)")
    add(
        "--probe", action="store_true", help="ask each instance for one token, to see whether it finds another's blocks"
    )
    add("--quiet", action="store_true", help="leave out what is ok")
    add("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 1 if anything does not work."""
    from mooncake.doctor.examination import Plan, examine
    from mooncake.doctor.findings import as_json, as_table, exit_code
    from mooncake.doctor.pool import PoolPlace

    path = options.config or os.environ.get("MOONCAKE_CONFIG_PATH", "")
    content = read_mapping(path, "pool's configuration file") if path else {}
    master, origin = _master(options, content, path)
    metrics_port = options.metrics_port
    if metrics_port is None:
        metrics_port = environment_whole("MOONCAKE_MASTER_METRICS_PORT", 0) or None
    place = PoolPlace(
        master=master,
        origin=origin,
        metrics_port=metrics_port or _DEFAULT_METRICS_PORT,
        metrics_given=metrics_port is not None,
        metadata=str(content.get("metadata_server") or ""),
        limit=options.timeout,
    )
    plan = Plan(
        place=place,
        protocol=str(content.get("protocol") or "").lower(),
        segment_size=_segment_size(content, path),
        instances=tuple(options.instance),
        proxies=tuple(options.proxy),
        ports=tuple(options.port),
        limit=options.timeout,
        probe=options.probe,
    )
    findings = examine(plan)
    print(as_json(findings) if options.json else as_table(findings, options.quiet))
    return exit_code(findings)


def _master(options: argparse.Namespace, content: dict[str, Any], path: str) -> tuple[str, str]:
    """The master's address, and where that was said."""
    if options.master:
        return str(options.master), "--master"
    if content:
        address = content.get("master_server_address")
        if not isinstance(address, str) or not address:
            raise ConfigError(
                f'The pool\'s configuration file {path} lacks the field master_server_address: expected "host:port".'
            )
        return address, path
    address = os.environ.get("MOONCAKE_MASTER", "")
    return address, "MOONCAKE_MASTER"


def _segment_size(content: dict[str, Any], path: str) -> int:
    try:
        return parse_size(content.get("global_segment_size") or 0)
    except ValueError as error:
        raise ConfigError(f"The pool's configuration file {path} is wrong in global_segment_size: {error}.") from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 60:
        raise argparse.ArgumentTypeError(f'expected seconds, above 0 and up to 60, but found "{text}"')
    return value
