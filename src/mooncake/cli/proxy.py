"""`mooncake_proxy`: one address in front of prefill and decode instances, until SIGINT or SIGTERM."""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys

from mooncake.cli.listening import listen
from mooncake.errors import ConfigError
from mooncake.installed_once import refuse_if_cpp_installed
from mooncake.proxy.admin import make_instance
from mooncake.proxy.app import Proxy
from mooncake.proxy.config import Connector, HealthChecks, Limits, ProxyConfig, ResumeBy
from mooncake.proxy.instances import Instance, Role
from mooncake.proxy.policies import POLICIES
from mooncake.security.secret import authorization
from mooncake.version import __version__

logger = logging.getLogger("mooncake.proxy")

_ADMIN_KEY = "ADMIN_API_KEY"


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mooncake_proxy",
        description="Serve OpenAI's API through prefill and decode instances.",
        epilog=f"The environment variable {_ADMIN_KEY} is the key for adding and removing instances at run time.",
        allow_abbrev=False,
    )
    add, limits, health = parser.add_argument, Limits(), HealthChecks()
    add(
        "--prefill",
        nargs="+",
        action="append",
        default=[],
        metavar=("URL", "BOOTSTRAP_PORT"),
        help="a prefill instance; with its bootstrap port (or 'none') when it uses MooncakeConnector; repeatable",
    )
    add("--decode", action="append", default=[], metavar="URL", help="a decode instance; repeatable")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on, 0 for any (default %(default)s)")
    add("--policy", choices=sorted(POLICIES), default="round_robin", help="which instance gets a request (%(default)s)")
    add(
        "--prefix-length",
        type=int,
        default=ProxyConfig().prefix_length,
        metavar="N",
        help="characters or token ids of a prompt that prefix_affinity looks at (default 1024)",
    )
    add("--indexer", default="", metavar="URL", help="a mooncake_conductor that prefix_affinity asks who has a prompt")
    add(
        "--connector",
        choices=[*Connector],
        default=Connector.AUTO,
        type=Connector,
        help="how KV cache travels: auto is mooncake with a bootstrap port, store without (default auto)",
    )
    add("--resume", choices=[*ResumeBy], default=ResumeBy.TOKENS, type=ResumeBy,
        help="from what a lost greedy stream is resumed (default tokens)")  # fmt: skip
    for flag, default, meaning in (
        ("connect-timeout", limits.connect_s, "for a connection to an instance"),
        ("first-byte-timeout", limits.first_byte_s, "for the first event of a streamed answer"),
        ("chunk-timeout", limits.chunk_s, "between two pieces of a streamed answer"),
        ("response-timeout", limits.response_s, "for an answer that is not streamed"),
        ("prefill-timeout", limits.prefill_s, "for the prefill half"),
        ("wait-timeout", limits.wait_s, "for a decode instance to become available"),
        ("drain-timeout", limits.drain_s, "for the requests of an instance that is being removed"),
        ("health-interval", health.interval_s, "between health checks of an instance"),
        ("health-timeout", health.timeout_s, "for the answer to a health check"),
        ("indexer-timeout", ProxyConfig().indexer_s, "that a request may wait for the indexer"),
    ):
        add(f"--{flag}", type=_seconds, default=default, metavar="S", help=f"seconds {meaning} (default {default:g})")
    add(
        "--retries",
        type=int,
        default=limits.retries,
        metavar="N",
        help="further tries of a request that makes no progress (default %(default)s)",
    )
    add(
        "--health-failures",
        type=int,
        default=health.failures,
        metavar="N",
        help="unanswered health checks in a row that eject an instance (default %(default)s)",
    )
    add("--health-successes", type=int, default=health.successes, metavar="N",
        help="good health checks in a row that bring it back (default %(default)s)")  # fmt: skip
    add("--version", action="version", version=f"mooncake_proxy version {__version__}")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    refuse_if_cpp_installed()
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(asctime)s %(name)s: %(message)s")
    try:
        config = _config(options)
        instances = _instances(options)
        listening = listen(config.host, config.port)
    except ConfigError as error:
        print(f"mooncake_proxy: {error}", file=sys.stderr)
        return 1
    _new_loop().run_until_complete(_serve(config, instances, listening))
    return 0


def _config(options: argparse.Namespace) -> ProxyConfig:
    if options.indexer and options.policy != "prefix_affinity":
        raise ConfigError(f"--indexer is for --policy prefix_affinity, but the policy is {options.policy}.")
    if options.indexer and not options.indexer.startswith(("http://", "https://")):
        raise ConfigError(f"--indexer {options.indexer}: expected a URL such as http://127.0.0.1:13333.")
    return ProxyConfig(
        host=options.host,
        port=options.port,
        policy=options.policy,
        prefix_length=options.prefix_length,
        indexer=options.indexer,
        indexer_headers=authorization() if options.indexer else {},
        indexer_s=options.indexer_timeout,
        connector=options.connector,
        resume_by=options.resume,
        admin_key=os.environ.get(_ADMIN_KEY, ""),
        limits=Limits(
            connect_s=options.connect_timeout,
            first_byte_s=options.first_byte_timeout,
            chunk_s=options.chunk_timeout,
            response_s=options.response_timeout,
            prefill_s=options.prefill_timeout,
            wait_s=options.wait_timeout,
            drain_s=options.drain_timeout,
            retries=options.retries,
        ),
        health=HealthChecks(
            interval_s=options.health_interval,
            timeout_s=options.health_timeout,
            failures=options.health_failures,
            successes=options.health_successes,
        ),
    )


def _instances(options: argparse.Namespace) -> list[Instance]:
    made: dict[tuple[Role, str], Instance] = {}
    asked = [(Role.PREFILL, *_prefill(words)) for words in options.prefill]
    asked += [(Role.DECODE, url, None) for url in options.decode]
    for role, url, port in asked:
        try:
            instance = make_instance(role, url, port, options.connector)
        except ValueError as error:
            raise ConfigError(f"--{role}: {error}") from None
        if made.setdefault((role, instance.url), instance) is not instance:
            raise ConfigError(f"--{role} {url} is given twice.")
    return list(made.values())


def _prefill(words: list[str]) -> tuple[str, int | None]:
    """URL and bootstrap port of one --prefill."""
    url, *rest = words
    if len(rest) > 1:
        raise ConfigError(f"--prefill {' '.join(words)}: expected a URL and at most one bootstrap port.")
    if not rest or rest[0].lower() == "none":
        return url, None
    if not rest[0].isdecimal():
        raise ConfigError(f"--prefill {url} {rest[0]}: the bootstrap port must be a number or 'none'.")
    return url, int(rest[0])


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(config: ProxyConfig, instances: list[Instance], listening: socket.socket) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    proxy = Proxy(config, instances)
    await proxy.start(listening)
    if not config.admin_key:
        logger.info("%s is not set: instances cannot be added or removed at run time", _ADMIN_KEY)
    logger.info("serving on http://%s:%d with policy %s", config.host, listening.getsockname()[1], config.policy)
    await stopped.wait()
    await proxy.stop()


if __name__ == "__main__":
    sys.exit(main())
