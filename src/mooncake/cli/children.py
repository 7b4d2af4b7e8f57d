"""The processes that a command starts: each in a session of its own, with a log, and none of them left behind.

The command becomes the reaper of everything below it (PR_SET_CHILD_SUBREAPER), so that a segment server whose engine
was killed is still found and ended.  Should the command itself be killed outright, `guard` ends its children: a
parent-death signal would reach them, but not what they started.
Only processes of this command's own tree are ever signalled.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from mooncake.errors import MooncakeError

STOP_LIMIT = 10.0  # seconds from SIGINT to SIGKILL
ORPHAN_LIMIT = 3.0  # seconds that a child's own children get to notice

_PR_SET_CHILD_SUBREAPER = 36
_LAST_LINES = 12

_GUARD = Path(__file__).with_name("guard.py")
_prctl = ctypes.CDLL(None).prctl
_prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived.  Not an Exception, so that no handler of errors swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class ChildFailed(MooncakeError):
    """A child ended or did not get ready.  The text ends with the last lines of its log."""


class Child:
    """One started process."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.log = log
        self._process = process

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def signal(self, number: int) -> None:
        """To the child's process group: what Ctrl-C in a terminal of its own would reach."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def wait(self, limit: float) -> bool:
        """Whether it has ended within `limit` seconds."""
        try:
            self._process.wait(max(limit, 0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def failure(self, what: str) -> ChildFailed:
        """An error that says what happened and shows the log's last lines."""
        lines = self.log.read_text(errors="replace").splitlines()
        shown = "".join(f"\n    {line}" for line in lines[-_LAST_LINES:]) or " nothing"
        return ChildFailed(f"{self.name} {what}; the end of its log ({self.log.name}):{shown}")

    def ended(self) -> ChildFailed:
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return self.failure(how)


class Children:
    """Starts processes and, when left, stops them all in reverse order; usable once, by the main thread.

    `folder` is removed should the command be killed outright; otherwise it is the caller's.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._children: list[Child] = []
        self._folder = [] if folder is None else [folder]
        self._guard: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD, *self._folder],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hurry = _Hurry()  # a second Ctrl-C does not wait any longer, and leaves nothing behind either
        for child in reversed(self._children):
            if child.running:
                child.signal(signal.SIGINT)
            deadline = time.monotonic() + STOP_LIMIT
            while not (child.wait(0.05) or hurry.asked or time.monotonic() >= deadline):
                pass
            if child.running:
                child.signal(signal.SIGKILL)
                child.wait(STOP_LIMIT)
            self._tell_guard(-child.pid)
        if self._guard:
            self._tell_guard(0)
            self._guard.communicate()
        _end_orphans(0.0 if hurry.asked else ORPHAN_LIMIT)

    def start(self, name: str, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Child:
        """Start `argv` with its output in `log`."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        self._tell_guard(process.pid)
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def stop(self, *children: Child) -> None:
        """Stop these, all at once, before the others."""
        for child in children:
            child.signal(signal.SIGINT)
        deadline = time.monotonic() + STOP_LIMIT
        for child in children:
            if not child.wait(deadline - time.monotonic()):
                child.signal(signal.SIGKILL)
                child.wait(STOP_LIMIT)
            self._forget(child)

    def run(self, name: str, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        """Run `argv` to its end.  Raises ChildFailed if it fails."""
        child = self.start(name, argv, log, environment)
        while not child.wait(1.0):
            pass
        self._forget(child)
        if child.exit_code:
            raise child.ended()

    def wait_ready(self, child: Child, ready: Callable[[], bool], limit: float, poll: float = 0.1) -> None:
        """Until `ready()`.  Raises ChildFailed when any child ends meanwhile, or after `limit` seconds."""
        deadline = time.monotonic() + limit
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise child.failure(f"was not ready within {limit:.0f} s")
            time.sleep(poll)

    def check(self) -> None:
        """Raises ChildFailed for the first child that has ended."""
        for child in self._children:
            if not child.running:
                raise child.ended()

    def watch(self) -> None:
        """Sleeps until a child ends, and raises ChildFailed; an arriving signal raises Interrupted."""
        with contextlib.ExitStack() as held:
            descriptors = []
            for child in self._children:
                try:
                    descriptors.append(os.pidfd_open(child.pid))
                except ProcessLookupError:
                    raise child.ended() from None
                held.callback(os.close, descriptors[-1])
            select.select(descriptors, [], [])
        self.check()

    def _forget(self, child: Child) -> None:
        self._children.remove(child)
        self._tell_guard(-child.pid)

    def _tell_guard(self, group: int) -> None:
        """Add a process group, forget it (negative), or say that everything was stopped (0)."""
        assert self._guard
        assert self._guard.stdin
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(f"{group}\n")
            self._guard.stdin.flush()


class _Hurry:
    """From its making on, SIGINT and SIGTERM only set `asked`."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs an installed module, whatever folder the user stands in, with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


def own_command(module: str, *arguments: str) -> list[str]:
    """The command line of one of this package's commands, by the module that has its `main`."""
    return [sys.executable, "-P", "-c", f"import sys; from {module} import main; sys.exit(main())", *arguments]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


def _end_orphans(limit: float) -> None:
    """Wait for the children that fell to this process when their own parents ended; kill those that stay."""
    deadline = time.monotonic() + limit
    while _reap() and time.monotonic() < deadline:
        time.sleep(0.05)
    while pids := list(_own_children()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while _reap() and not set(pids).isdisjoint(_own_children()):
            time.sleep(0.05)


def _reap() -> bool:
    """Collect every child that has ended; whether others are left."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def _own_children() -> Iterator[int]:
    me = str(os.getpid())
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path("/proc", entry, "stat").read_text()
                if stat.rpartition(")")[2].split()[1] == me:
                    yield int(entry)
