"""The commands.  `mooncake.cli:main` is the master, as in the C++ wheel."""


def main() -> int:
    """Run `mooncake_master`."""
    from mooncake.cli.master import main as run_master

    return run_master()
