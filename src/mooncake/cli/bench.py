"""`mooncake bench`: its subcommands' flags.  The work is in `mooncake.bench`, imported when it is to be done."""

import argparse
import importlib
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from mooncake.bench.steps import DEFAULT_STEPS, Step, parse_steps
from mooncake.bench.workload import DEFAULT_VOCABULARY, Lengths
from mooncake.cli.arguments import whole
from mooncake.cli.gflags import size
from mooncake.config_text import environment_whole
from mooncake.errors import ConfigError
from mooncake.installed_once import refuse_if_cpp_installed

_MIB = 1 << 20


def add_parser(commands: Any) -> None:
    """Describe the subcommand to argparse."""
    bench = commands.add_parser(
        "bench",
        help="measure a pool, or prefill and decode instances",
        description="Measures a pool, or prefill and decode instances.",
    )
    kinds = bench.add_subparsers(required=True, metavar="BENCHMARK")
    _add_stress(kinds)
    _add_xpyd(kinds)
    _add_serve_load(kinds)


# ------------------------------------------------------------ stress


def _add_stress(kinds: Any) -> None:
    parser = kinds.add_parser(
        "stress",
        help="put values in one process, get them in another, compare every byte",
        description="Prefill puts values that describe themselves; decode, in another terminal or on another host, "
        "gets them and compares every byte. Either may be started first.",
    )
    add = parser.add_argument
    add("--role", choices=["prefill", "decode"], required=True, help="prefill puts, decode gets")
    add("--protocol", default="tcp", help="tcp, or rdma where present (default %(default)s)")
    add("--device-name", default="", help="RDMA devices; unused with tcp")
    add("--local-hostname", default="localhost",
        help="name or address that other hosts reach this one by (default %(default)s)")  # fmt: skip
    add("--metadata-server", default="P2PHANDSHAKE", help="P2PHANDSHAKE: no metadata service (default)")
    add("--master-server", default="localhost:50051", help="host:port of the master (default %(default)s)")
    add("--global-segment-size", type=_megabytes, default=None, metavar="SIZE",
        help="memory to give to the pool, in MB or as 4GB (default 10000 for prefill, 0 for decode)")  # fmt: skip
    add("--local-buffer-size", type=_megabytes, default="512", metavar="SIZE",
        help="in MB, or as 1GB (default %(default)s)")  # fmt: skip
    add("--max-requests", type=_positive, default=1200, help="values in all (default %(default)s)")
    add("--value-length", type=size, default="4194304", help="bytes of a value, also as 4MB (default %(default)s)")
    add("--batch-size", type=_positive, default=1, help="values a call (default %(default)s)")
    add("--num-workers", type=_positive, default=1, help="threads that call (default %(default)s)")
    add("--wait-time", type=_count, default=20, metavar="S",
        help="seconds that prefill stays after its last put, and that decode waits for a value (default %(default)s)"
        )  # fmt: skip
    add("--detailed-stats", action="store_true", help="figures of every worker as well")
    add("--key-prefix", default="stress", help="what all keys begin with (default %(default)s)")
    add("--seed", type=_count, default=0, help="of the values; the same in both roles (default %(default)s)")
    parser.set_defaults(run=_runner("mooncake.bench.stress", _prepare_stress))


def _prepare_stress(options: argparse.Namespace) -> None:
    if options.value_length <= 0:
        raise ConfigError(f"--value-length is {options.value_length}; expected a positive number of bytes.")
    if options.global_segment_size is None:
        options.global_segment_size = 10000 * _MIB if options.role == "prefill" else 0
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# ------------------------------------------------------------ load


def _add_serve_load(kinds: Any) -> None:
    parser = kinds.add_parser(
        "serve-load",
        help="send a stream of requests to a server that runs already",
        description="Sends streamed completions to a server with OpenAI's API, such as mooncake_proxy or vLLM, at the "
        "times of a Poisson process, and reports how long the answers took.",
    )
    parser.add_argument("--url", required=True, help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", default="", help="name of the model (default: the only one that the server has)")
    _add_load(parser)
    parser.add_argument("--output", type=_folder, help="folder for results.xlsx, results.json and charts")
    parser.set_defaults(
        run=_runner("mooncake.bench.serve_load", _prepare_load), warmup=2, vocabulary=DEFAULT_VOCABULARY
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=_positive, default=200, metavar="N", help="how many (default %(default)s)")
    add(
        "--rate", type=_number, default="4", help="arrivals a second on average; inf: all at once (default %(default)s)"
    )
    add("--input-len", type=_lengths, default="512", metavar="N|LOW:HIGH",
        help="tokens of a prompt, or a range that they are drawn from (default %(default)s)")  # fmt: skip
    add("--output-len", type=_lengths, default="64", metavar="N|LOW:HIGH",
        help="tokens of an answer (default %(default)s)")  # fmt: skip
    add("--shared-prefix", type=_count, default=0, metavar="N", help="tokens that all prompts begin with (default 0)")
    add("--vocabulary", type=_vocabulary, metavar="N",
        help=f"prompts have token ids below this (default: the model folder's, else {DEFAULT_VOCABULARY})")  # fmt: skip
    add("--seed", type=_count, default=0, help="of arrivals, lengths and prompts (default %(default)s)")
    add("--warmup", type=_count, metavar="N", help="requests before the measured ones, one by one")
    add("--request-timeout", type=_seconds, default=600.0, metavar="S", help="for a whole answer (default 600)")


def _prepare_load(options: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, _interrupt)


# ------------------------------------------------------------ xpyd


def _add_xpyd(kinds: Any) -> None:
    parser = kinds.add_parser(
        "xpyd",
        help="start x prefill and y decode instances of vLLM behind a proxy, and measure them",
        description="For every step starts a master, x prefill and y decode instances of vLLM and mooncake_proxy, "
        "sends the load, and stops them. Writes a workbook and charts.",
        epilog="The variables MODEL, NUM_PREFILL, NUM_DECODE, PREFILL_PORT_BASE, DECODE_PORT_BASE and MASTER_PORT "
        "stand for the flags of these names; a flag that is given wins.",
    )
    add = parser.add_argument
    add("--model", default=None, help="a folder, or a name that vLLM can find ($MODEL)")
    add("--steps", type=_steps, default=None, help=f"such as 1P1D,2P2D (default {DEFAULT_STEPS})")
    add("--num-prefill", type=_count, metavar="X", help="with --num-decode: the one step to run ($NUM_PREFILL)")
    add("--num-decode", type=_positive, metavar="Y", help="($NUM_DECODE)")
    for flag, what in (
        ("prefill-port-base", "port of the first prefill instance"),
        ("decode-port-base", "port of the first decode instance"),
        ("master-port", "the master's port"),
        ("proxy-port", "the proxy's port"),
    ):
        variable = "" if flag == "proxy-port" else f", ${_variable(flag)}"
        add(f"--{flag}", type=_port, metavar="PORT", help=f"{what} (default: free ones{variable})")
    add("--connector", choices=["both", "p2p", "store"], default="both",
        help="how KV cache travels: straight, through the pool, or both (default %(default)s)")  # fmt: skip
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: GPUs if there are any (default)")
    add("--tensor-parallel-size", type=_positive, default=1, metavar="N", help="GPUs an instance (default %(default)s)")
    add("--engine", default="", metavar="COMMAND",
        help="starts vLLM's API server; its arguments are appended (default: this Python's vLLM)")  # fmt: skip
    add("--engine-args", default="", metavar="ARGS", help="more arguments for every instance, as one word")
    add("--prefill-args", default="", metavar="ARGS", help="more for prefill instances")
    add("--decode-args", default="", metavar="ARGS", help="more for decode instances")
    add("--max-model-len", type=_positive, metavar="N", help="tokens (default: what the load needs)")
    add("--kv-cache-size", type=size, default="512MB", metavar="SIZE", help="of an instance on CPUs (%(default)s)")
    add("--segment-size", type=size, default="512MB", metavar="SIZE",
        help="memory that each instance's worker gives to the pool (default %(default)s)")  # fmt: skip
    add("--instance-memory", type=size, default="0", metavar="SIZE",
        help="memory of the host that an instance takes (default: estimated)")  # fmt: skip
    add("--ready-timeout", type=_seconds, default=600.0, metavar="S", help="until all instances serve (default 600)")
    _add_load(parser)
    add("--output", type=_folder, help="folder for results and logs (default: xpyd-DATE-TIME)")
    add("--no-report", action="store_true", help="write no workbook, no charts and no JSON")
    parser.set_defaults(run=_runner("mooncake.bench.xpyd", _prepare_xpyd))


def _prepare_xpyd(options: argparse.Namespace) -> None:
    """Fill in what the environment says where no flag does."""
    if options.model is None:
        options.model = os.environ.get("MODEL", "")
    for flag in ("prefill-port-base", "decode-port-base", "master-port", "proxy-port"):
        name = flag.replace("-", "_")
        if getattr(options, name) is None:
            port = 0 if flag == "proxy-port" else environment_whole(_variable(flag), 0)
            if not 0 <= port < 65536:
                raise ConfigError(f"The variable {_variable(flag)} is {port}; expected a port from 1 to 65535.")
            setattr(options, name, port)
    options.steps = _chosen_steps(options)


def _chosen_steps(options: argparse.Namespace) -> list[Step]:
    counts = (options.num_prefill, options.num_decode)
    if options.steps and counts != (None, None):
        raise ConfigError("--steps and --num-prefill or --num-decode say the same in two ways; give one of them.")
    if options.steps:
        steps: list[Step] = options.steps
        return steps
    prefill, decode = (
        count if count is not None else environment_whole(name, -1)
        for name, count in zip(("NUM_PREFILL", "NUM_DECODE"), counts, strict=True)
    )
    if prefill < 0 and decode < 0:
        return parse_steps(DEFAULT_STEPS)
    if decode == 0:
        raise ConfigError("NUM_DECODE is 0; expected at least one decode instance.")
    return [Step(prefill if prefill >= 0 else 1, decode if decode > 0 else 1)]


def _variable(flag: str) -> str:
    return flag.upper().replace("-", "_")


# ------------------------------------------------------------ values of flags


def _runner(module: str, prepare: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], int]:
    """Runs a benchmark's module once its flags are understood."""

    def run(options: argparse.Namespace) -> int:
        refuse_if_cpp_installed()
        prepare(options)
        try:
            code: int = importlib.import_module(module).run(options)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        return code

    return run


def _megabytes(text: str) -> int:
    """Bytes of "10000", which are MB as in the published script, or of text with a unit."""
    return int(text) * _MIB if text.isdecimal() else size(text)


def _positive(text: str) -> int:
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, but found {text}")
    return value


def _count(text: str) -> int:
    value = whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, but found {text}")
    return value


def _port(text: str) -> int:
    value = whole(text)
    if not 0 < value < 65536:
        raise argparse.ArgumentTypeError(f"expected a port number from 1 to 65535, but found {text}")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f'expected a number above 0, but found "{text}"')
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f'expected a number of seconds, but found "{text}"')
    return value


def _vocabulary(text: str) -> int:
    value = whole(text)
    if value < 16:
        raise argparse.ArgumentTypeError(f"expected at least 16 token ids, but found {text}")
    return value


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _steps(text: str) -> list[Step]:
    try:
        return parse_steps(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _folder(text: str) -> Path:
    """One that can be made."""
    folder = Path(text)
    if folder.exists() and not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return folder
