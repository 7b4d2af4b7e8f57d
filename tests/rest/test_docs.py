"""docs/rest.md, and what other pages say of the same: commands work when they are pasted, names exist."""

import json
import os
import re
import subprocess
from pathlib import Path

from mooncake.mooncake_store_service import _parser
from tests.processes import BIN, free_port, wait_until
from tests.rest.conftest import COMMAND, environment

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "rest.md").read_text()
METRICS = (DOCS / "store.md").read_text().partition("## Health and metrics")[2].partition("\n## ")[0]


def with_expectation(line: str) -> tuple[str, str]:
    """A command, and what it answers according to the page."""
    command, _, expected = line.partition(" # ")
    return command.strip(), expected.strip()


def test_the_commands(master, cleanup, tmp_path):
    shell = {**environment(), "PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}"}
    command = tmp_path / "mc_store_rest_server"  # as installed
    command.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    command.chmod(0o755)
    port = str(free_port())
    (settings,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert "127.0.0.1:50051" in settings
    (tmp_path / "mooncake.json").write_text(settings.replace("127.0.0.1:50051", master.address))
    lines = [line.strip() for line in PAGE.partition("## The command")[0].splitlines() if line.startswith("    ")]
    assert lines[0].startswith("mooncake_master --rpc_port=50051")
    start = lines[1].removesuffix(" &")
    assert start.startswith("mc_store_rest_server ")
    service = subprocess.Popen(["sh", "-c", f"exec {start.replace('8080', port)}"], env=shell, cwd=tmp_path)
    cleanup.callback(service.wait)
    cleanup.callback(service.kill)
    asked = [with_expectation(line) for line in lines[2:]]
    assert len(asked) == 6
    for curl, expected in asked:
        run = subprocess.run(
            ["sh", "-c", curl.replace("8080", port)], env=shell, capture_output=True, text=True, timeout=60, check=True
        )
        assert run.stdout == expected, curl
    service.terminate()
    assert service.wait(10) == 0


def test_the_flags_and_routes():
    flags = {option for action in _parser()._actions for option in action.option_strings}
    told = set(re.findall(r"^\| `(-[-\w]+)", PAGE, re.MULTILINE))
    assert told == flags - {"-h", "--help", "--version", "--define"} | ({"-D"} & told)
    source = (Path(__file__).parents[2] / "src/mooncake/rest/server.py").read_text()
    routes = re.findall(r'web\.(put|get|post|delete)\("(/api/\w+)', source)
    assert {(method.lower(), path) for method, path in re.findall(r"\| `(\w+) (/api/\w+)", PAGE)} == set(routes)


def test_the_metrics(make_master, cleanup, tmp_path):
    """The page names those that there are, neither more nor less; and its command works."""
    from mooncake.store import MooncakeDistributedStore
    from tests.store.test_client_http import ask

    master, port = make_master("--enable_offload"), free_port()
    store = MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 1 << 20, "tcp", "", master.address, None, True, str(tmp_path))
    assert store.setup(*arguments, enable_client_http_server=True, client_http_port=port) == 0
    cleanup.callback(store.close)
    assert store.get("none") == b""
    wait_until(lambda: "mooncake_segment_disk" in ask(port, "/metrics")[2], what="the tier")
    there = set(re.findall(r"^# TYPE (\w+)", ask(port, "/metrics")[2], re.MULTILINE))
    assert set(re.findall(r"`(mooncake_(?:transfer|client|segment)_\w+)(?:\{\w+\})?`", METRICS)) == there

    (block,) = re.findall(r"```bash\n(.*?)```", METRICS, re.DOTALL)
    start, health, summary = block.splitlines()
    port = str(free_port())
    command = f"exec {start.removesuffix(' &').replace('9300', port)} --master_server_address={master.address}"
    process = subprocess.Popen(
        ["sh", "-c", f"{command} --port={free_port()}"],
        env={**environment(), "PATH": f"{BIN}:{os.environ['PATH']}"},
        stderr=subprocess.DEVNULL,
    )
    cleanup.callback(process.wait)
    cleanup.callback(process.kill)
    curl, expected = with_expectation(health.replace("9300", port))
    wait_until(lambda: _answer(curl) == expected, what="its health")
    assert json.loads(expected) == {"status": "healthy", "code": 0}
    assert "mooncake_segment_mounted" in _answer(summary.replace("9300", port))


def _answer(curl: str) -> str:
    return subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=60, check=True).stdout
