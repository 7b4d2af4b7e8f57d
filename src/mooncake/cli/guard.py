"""Ends a command's children when the command was killed outright and could not do so itself.

Runs as a script, started by `children.Children` with a pipe as its input: a line with a positive number adds a process
group, one with a negative number forgets it.  At the pipe's end, which the kernel brings about whatever happened to
the command, the groups that are left are killed; after a command that stopped them itself none are.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line)
        if group > 0:
            groups.add(group)
        else:
            groups.discard(-group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
