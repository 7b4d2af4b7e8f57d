"""The commands of docs/bench.md work when they are pasted."""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

from tests.processes import BIN, free_port

PAGE = Path(__file__).parents[2] / "docs" / "bench.md"


def commands(begin: str) -> list[list[str]]:
    """Indented commands, with their continuation lines."""
    text = re.sub(r"\\\n\s+", "", PAGE.read_text())
    lines = [line.strip() for line in text.splitlines() if line.startswith(f"    {begin}")]
    return [shlex.split(line, comments=True) for line in lines]


def test_stress(cleanup):
    (up,) = commands("mooncake up")
    puts, gets = commands("mooncake bench stress")
    port = free_port()

    def start(words: list[str], *more: str) -> subprocess.Popen:
        here = [word.replace("50051", str(port)) for word in words[1:]]
        process = subprocess.Popen([BIN / "mooncake", *here, *more], stdout=subprocess.PIPE, text=True)
        cleanup.callback(process.wait, 20)
        cleanup.callback(process.stdout.close)
        cleanup.callback(process.send_signal, signal.SIGINT)
        return process

    pool = start(up)
    assert pool.stdout.readline().startswith("A pool of 1 GiB is up")
    start(puts, "--master-server", f"localhost:{port}")
    out, _ = start(gets, "--master-server", f"localhost:{port}").communicate(timeout=60)
    assert out.endswith("Every byte was right.\n")


def test_serve_load_and_xpyd_are_spelled_right(tmp_path):
    """Their flags are all known; what they would start is not there."""
    (load,) = commands("mooncake bench serve-load")
    runs = [*commands("mooncake bench xpyd"), load]
    assert len(runs) == 4
    for words in runs:
        argv = [BIN / "mooncake", *words[1:]]
        more = ["--url", "http://127.0.0.1:1"] if words is load else ["--engine", "/no/such/program"]
        environment = {**os.environ, "NO_PROXY": "*"}
        done = subprocess.run(
            [*argv, *more], capture_output=True, text=True, timeout=30, cwd=tmp_path, env=environment, check=False
        )
        assert done.returncode == 1, done.stderr
        assert "/no/such/program" in done.stderr or "cannot be asked for its models" in done.stderr
