"""`transfer_engine_topology_dump`: which network devices lie near which memory, as the transfer engine sees it."""

import os
import sys

from mooncake.cli.arguments import Parser
from mooncake.installed_once import refuse_if_cpp_installed


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    try:
        refuse_if_cpp_installed()
    except ImportError as error:
        print(f"transfer_engine_topology_dump: {error}", file=sys.stderr)
        return 1
    parser = Parser(
        prog="transfer_engine_topology_dump",
        description="Print one line with the topology as JSON: location → [preferred devices, other devices].",
    )
    add = parser.add_argument
    add("--device-name", default="", help="only these devices, separated by commas")
    add("--backend", choices=["auto", "te", "tent"], default="auto", help="only te is supported by this version")
    add("--use-custom-topo", action="store_true", help="print --custom-topo-json instead of looking")
    add("--custom-topo-json", default="", help="file with a topology (default: the variable MC_CUSTOM_TOPO_JSON)")
    options = parser.parse_args(arguments)
    custom = ""
    if options.backend == "tent":
        return _refuse("--backend tent is not supported by this version; use te")
    if options.use_custom_topo:
        custom = options.custom_topo_json or os.environ.get("MC_CUSTOM_TOPO_JSON", "")
        if not custom:
            return _refuse("--use-custom-topo needs --custom-topo-json FILE")
    from mooncake.engine.topology import local_topology

    try:
        topology = local_topology(options.device_name, custom)
    except OSError as error:
        return _refuse(f"{custom} cannot be read: {error.strerror}")
    print(f"Local topology [te/{'custom' if custom else 'discover'}]: {topology.strip()}")
    return 0


def _refuse(reason: str) -> int:
    print(f"transfer_engine_topology_dump: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
