"""`scripts/demo`, as a user runs it: its figures, and that it leaves nothing behind however it ends."""

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.processes import gone, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

DEMO = Path(__file__).parents[2] / "scripts" / "demo"


class Run:
    """A demo in a group of its own; every process below it carries a marker in its environment."""

    def __init__(self, *arguments: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="demo-")  # for what one that is killed or fails leaves there
        self._marker = f"TMPDIR={self._folder.name}"
        self.process = subprocess.Popen(
            [DEMO, *arguments],
            env={**os.environ, "TMPDIR": self._folder.name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def read_until(self, text: str) -> str:
        """What it printed up to the line that holds `text`."""
        read = ""
        for line in self.process.stdout:
            read += line
            if text in line:
                return read
        raise AssertionError(read)

    def end(self, limit: float) -> tuple[int, str]:
        """Exit code and the rest of what it printed."""
        text = self.process.communicate(timeout=limit)[0]
        return self.process.returncode, text

    def processes(self) -> dict[int, str]:
        """Pids and command lines of all its processes that live."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    if self._marker.encode() in (folder / "environ").read_bytes():
                        found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate()
        left = self.processes()
        self._folder.cleanup()
        assert left == {}

    def find(self, text: str) -> int:
        """The pid of the one process whose command line holds `text`."""
        (pid,) = [pid for pid, command in self.processes().items() if text in command]
        return pid


@pytest.fixture
def demo(python):
    """Starts demos; skips where there is no vLLM environment."""
    runs = []

    def start(*arguments: str) -> Run:
        runs.append(Run(*arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def test_figures(demo, tmp_path):
    file = tmp_path / "figures.json"
    code, text = demo("--json", str(file)).end(600)
    assert code == 0, text
    assert "time to first token, warm on B" in text

    figures = json.loads(file.read_text())
    assert figures["same_answer"] is True
    assert figures["prompt_tokens"] >= 1500
    full_blocks = figures["prompt_tokens"] // figures["block_size"]
    assert figures["pool_tokens"] >= (full_blocks - 1) * figures["block_size"]
    assert figures["pool_keys"] >= full_blocks
    assert figures["ttft_warm_s"] <= 0.5 * figures["ttft_cold_s"]
    assert "Solheim" in figures["answer"]


def test_figures_of_prefill_and_decode(demo, tmp_path):
    file = tmp_path / "figures.json"
    code, text = demo("--prefill", "1", "--decode", "1", "--json", str(file)).end(600)
    assert code == 0, text
    assert "prefill loads from the pool, decode takes it over" in text

    figures = json.loads(file.read_text())
    assert figures["same_answer"] is True
    assert "Solheim" in figures["answer"]
    tokens = figures["prompt_tokens"]
    parts = {(part.pop("question"), part.pop("instance")): part for part in figures["parts"]}
    assert set(parts) == {(question, one) for question in ("first", "again") for one in ("prefill 1", "decode 1")}
    computed = {"computed": tokens, "from_pool": 0, "from_prefill": 0, "made": 1}
    assert parts["first", "prefill 1"] == computed
    assert parts["again", "prefill 1"]["from_pool"] >= tokens - 2 * 32
    for question in ("first", "again"):
        taken = parts[question, "decode 1"]
        assert (taken["computed"], taken["from_pool"], taken["from_prefill"]) == (0, 0, tokens)
    assert figures["ttft_again_s"] <= 0.5 * figures["ttft_first_s"]


@pytest.mark.parametrize(("number", "limit"), [(signal.SIGINT, 20), (signal.SIGTERM, 20), (signal.SIGKILL, 10)])
def test_leaves_no_process_behind(demo, number, limit):
    run = demo()
    run.read_until("starting vLLM instance A")
    time.sleep(6)  # into the instances' start
    assert len(run.processes()) >= 4
    run.process.send_signal(number)
    code, _ = run.end(limit)
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: not run.processes(), limit, "the end of every process")


def test_a_dead_instance_ends_the_demo_with_its_reason(demo):
    run = demo()
    run.read_until("asking the reference instance")
    instance, segment_server = run.find("lookup_rpc_port"), run.find("mooncake.segment")
    os.kill(instance, signal.SIGKILL)
    code, text = run.end(60)
    assert code == 1
    assert "scripts/demo: vLLM (instance A) was ended by SIGKILL" in text
    assert gone(segment_server)
