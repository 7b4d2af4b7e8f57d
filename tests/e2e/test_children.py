"""What a command starts is gone when the command is, however unwilling it is."""

import os
import signal
import subprocess
import sys

from tests.processes import gone, wait_until

STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # as a private segment server
print(sleeper.pid, flush=True)
time.sleep(1000)
"""
COMMAND = f"""
import sys, time
from pathlib import Path
from mooncake.cli import children
children.STOP_LIMIT = children.ORPHAN_LIMIT = 0.3
log = Path(sys.argv[1])
with children.Children() as started:
    child = started.start("the stubborn one", [sys.executable, "-c", {STUBBORN!r}], log)
    started.wait_ready(child, lambda: log.read_text().endswith("\\n"), 10)
    print(child.pid, log.read_text(), flush=True)
    {{}}
"""


def run(tmp_path, then: str) -> tuple[subprocess.CompletedProcess, list[int]]:
    command = [sys.executable, "-c", COMMAND.format(then), tmp_path / "child.log"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return result, [int(pid) for pid in result.stdout.split()]


def test_stubborn_child_and_its_own_child_are_ended(tmp_path):
    result, pids = run(tmp_path, "pass")
    assert result.returncode == 0, result.stderr
    assert len(pids) == 2
    assert all(map(gone, pids))


def test_killed_command_takes_its_children_along(tmp_path):
    _, (child, sleeper) = run(tmp_path, "import os; os.kill(os.getpid(), 9)")
    try:
        wait_until(lambda: gone(child), 5)
    finally:
        os.kill(sleeper, signal.SIGKILL)  # a session of its own: a segment server would notice by itself


def test_failed_command_shows_the_end_of_its_log(tmp_path):
    then = "started.run('the short one', [sys.executable, '-c', 'print(6 * 7); raise SystemExit(3)'], log)"
    result, pids = run(tmp_path, then)
    assert result.stderr.endswith(
        "ChildFailed: the short one ended with exit code 3; the end of its log (child.log):\n    42\n"
    )
    assert all(map(gone, pids))
