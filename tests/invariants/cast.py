"""The processes of a scenario: who was killed, and whether anybody else died."""

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.processes import children, gone

MARK = "INVARIANTS_CAST"


def marked(mark: str) -> dict[int, str]:
    """{pid: command} of all living processes whose environment has this mark."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes() and not gone(int(entry.name)):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    return found


class Cast:
    """Whoever is started within `started` is known by a mark in its environment, and so are its own children."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self._members: dict[int, str] = {}
        self._expected: set[int] = set()

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        os.environ[MARK] = self.mark
        try:
            yield
        finally:
            del os.environ[MARK]

    def add(self, name: str, pid: int) -> int:
        """`pid` and the children that it has; a name may be that of several."""
        self._members[pid] = name
        for child in children(pid):
            self._members[child] = f"a child of {name}"
        return pid

    def kill(self, pid: int) -> None:
        """It, and the children that are to go with it."""
        self.leaves(pid)
        os.kill(pid, signal.SIGKILL)

    def leaves(self, pid: int) -> None:
        """It was told to end."""
        self._expected |= {pid, *children(pid)}

    def dead(self) -> list[str]:
        """Who died and had not been killed."""
        return [f"{name} ({pid})" for pid, name in self._members.items() if gone(pid) and pid not in self._expected]

    def left(self) -> dict[int, str]:
        """{pid: command} of every process of the cast that still runs."""
        return marked(self.mark)
