"""The command `mooncake`."""

import sys

from mooncake.cli import bench, doctor, tenant, up, warm
from mooncake.cli.arguments import Parser
from mooncake.errors import MooncakeError
from mooncake.version import __version__


def main() -> int:
    """Returns the exit code."""
    parser = Parser(prog="mooncake", description="A pool of KV-cache memory for inference engines.")
    parser.add_argument("--version", action="version", version=f"mooncake-py {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up.add_parser(commands)
    bench.add_parser(commands)
    doctor.add_parser(commands)
    warm.add_parser(commands)
    tenant.add_parser(commands)
    arguments = parser.parse_args()
    try:
        code: int = arguments.run(arguments)
    except (MooncakeError, ImportError) as error:
        print(f"mooncake: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
