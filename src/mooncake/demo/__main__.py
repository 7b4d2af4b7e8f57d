"""`python -m mooncake.demo`: two vLLM instances share a pool; with --prefill or --decode a chat goes through separate
prefill and decode instances.  Prints tables of who did what and how long it took.

Exit code: 0; 1 when something failed, the answers differ or nothing was handed over; 128 + n after signal n.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from mooncake.cli.arguments import Parser, whole
from mooncake.cli.children import Children, Interrupted
from mooncake.cli.loopback import HOST
from mooncake.demo.outcome import Outcome
from mooncake.demo.run import Demo
from mooncake.demo.servers import MODEL_ALIAS, Instance
from mooncake.demo.split import SplitDemo
from mooncake.demo.stage import Stage
from mooncake.errors import MooncakeError

_MOST = 8  # instances of a role


def main() -> int:
    arguments = _parse_arguments()
    folder = Path(tempfile.mkdtemp(prefix="mooncake-demo-"))
    outcome = None
    try:
        with Children() as children, _farewell():
            outcome = _course(arguments, Stage(children, folder, _cache(), Console())).run()
            outcome.figures.show(Console())
            if arguments.json:
                outcome.figures.write(arguments.json)
            if arguments.keep:
                print(_how_to_use(outcome), flush=True)
                children.watch()
        complaint = outcome.figures.complaint
    except MooncakeError as error:
        complaint = str(error)
    except Interrupted as signal:
        shutil.rmtree(folder)
        ended_well = arguments.keep and outcome is not None and not outcome.figures.complaint
        return 0 if ended_well else signal.exit_code
    if not complaint or not any(folder.iterdir()):
        shutil.rmtree(folder)
    if complaint:
        logs = f"\nThe logs are in {folder}" if folder.exists() else ""
        print(f"scripts/demo: {complaint}{logs}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _farewell() -> Iterator[None]:
    """However the demo ends: stopping may take some seconds."""
    try:
        yield
    finally:
        print("stopping all servers", flush=True)


def _course(arguments: argparse.Namespace, stage: Stage) -> Demo | SplitDemo:
    if arguments.prefill is None and arguments.decode is None:
        return Demo(stage)
    return SplitDemo(stage, arguments.prefill or 1, arguments.decode or 1)


def _parse_arguments() -> argparse.Namespace:
    parser = Parser(
        prog="scripts/demo",
        description="Two vLLM instances share one KV-cache pool: what the first computed, the second need not. "
        "With --prefill or --decode: separate prefill and decode instances behind a proxy.",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", type=whole, metavar="N", help=f"so many {role} instances, 1 to {_MOST} (about 2 GB each)"
        )
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    arguments = parser.parse_args()
    for role in ("prefill", "decode"):
        count = getattr(arguments, role)
        if count is not None and not 0 < count <= _MOST:
            parser.error(f"--{role} must be a number from 1 to {_MOST}, but is {count}")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {arguments.json.absolute().parent}")
    return arguments


def _cache() -> Path:
    """Where the model folder is kept from run to run."""
    if named := os.environ.get("MOONCAKE_DEMO_CACHE"):
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooncake-demo"


def _how_to_use(outcome: Outcome) -> str:
    return "\n".join(
        (
            f"\nEverything keeps running. {outcome.invitation}:",
            *(_curl(instance) for instance in outcome.open_to_questions),
            "The pool:",
            f"  curl http://{HOST}:{outcome.master.metrics_port}/metrics/summary",
            f"Logs: {outcome.master.child.log.parent}",
            f"Ctrl-C here, or `kill {os.getpid()}`, stops it all.",
        )
    )


def _curl(instance: Instance) -> str:
    body = {
        "model": MODEL_ALIAS,
        "messages": [{"role": "user", "content": "What is a tide?"}],
        "max_tokens": 60,
        "temperature": 0,
    }
    return (
        f"  curl http://{HOST}:{instance.port}/v1/chat/completions "
        f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )


if __name__ == "__main__":
    sys.exit(main())
