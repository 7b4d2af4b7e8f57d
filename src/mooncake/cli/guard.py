"""Ends a command's children when the command was killed outright and could not do so itself.

Runs as a script, started by `children.Children` with a pipe as its input: a line with a positive number adds a process
group, one with a negative number forgets it, and 0 says that the command has stopped everything itself.  At the pipe's
end, which the kernel brings about whatever happened to the command, the groups that are left are killed and, unless
the 0 came, the folder that the argument names is removed.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    orderly = False
    for line in sys.stdin:
        group = int(line)
        if group > 0:
            groups.add(group)
        elif group < 0:
            groups.discard(-group)
        else:
            orderly = True
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    if not orderly and len(sys.argv) > 1:
        import shutil

        shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
