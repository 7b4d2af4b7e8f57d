"""mooncake_master as users run it: a real process on real sockets."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "import sys; from mooncake.cli import main; sys.exit(main())"]
LOG_LINE = re.compile(r"^[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ [\w.]+:\d+\] ")


class Master:
    """A running mooncake_master on ports the system chose."""

    def __init__(self, *arguments: str) -> None:
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [
                *COMMAND,
                "--port=0",
                "--rpc_address=127.0.0.1",
                "--metrics_port=0",
                "--metrics_host=127.0.0.1",
                *arguments,
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.port = int(self.wait_for(r"Master service started on port (\d+), max_threads=\d+, ")[1])
        self.serving_after = time.monotonic() - self.started

    def wait_for(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            match = re.search(pattern, line)
            if match:
                return match
        raise AssertionError(f"no line {pattern!r} in {self.lines}")

    def admin_port(self) -> int:
        return int(self.wait_for(r"Master admin server started on port (\d+)")[1])

    def end(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Exit code, and how long it took."""
        began = time.monotonic()
        self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=10)
        self.lines += rest.splitlines(keepends=True)
        return self.process.returncode, time.monotonic() - began


@pytest.fixture
def master() -> Iterator[Master]:
    running = Master()
    yield running
    if running.process.poll() is None:
        running.process.kill()
    running.process.communicate()


def run(*arguments: str, timeout: float = 10) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


def one_sentence(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("mooncake_master: ")
    return result.stderr


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024


def fetch(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return str(answer.read().decode())


def test_start_serve_and_stop(master: Master) -> None:
    with socket.create_connection(("127.0.0.1", master.port), timeout=1):
        pass
    admin = master.admin_port()
    assert json.loads(fetch(admin, "/health"))["service_ready"] is True
    master.wait_for(r"Master Admin Metrics: role=leader, state=serving, service_ready=true, master=\{Mem.*\}, ha=\{")
    assert resident_mib(master.process.pid) < 60
    code, took = master.end()
    assert code == 0
    assert took < 0.3
    assert any("Shutdown signal received, exiting gracefully" in line for line in master.lines)
    assert all(LOG_LINE.match(line) for line in master.lines), master.lines


def test_interrupt_during_the_start_of_the_admin_server(master: Master) -> None:
    code, took = master.end(signal.SIGINT)
    assert code == 0
    assert took < 0.3


def test_answers_soon_after_the_start(master: Master) -> None:
    assert master.serving_after < 2  # 0.2 s on an idle machine; the suite shares two cores


def test_port_in_use(master: Master) -> None:
    admin = master.admin_port()
    hosts = ("--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1")
    text = one_sentence(run(*hosts, f"--rpc_port={master.port}", "--metrics_port=0"))
    assert f"Port {master.port} of 127.0.0.1 is in use" in text
    assert "--rpc_port" in text
    text = one_sentence(run(*hosts, "--port=0", f"--metrics_port={admin}"))
    assert f"Port {admin} of 127.0.0.1 is in use" in text
    assert "--metrics_port" in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--nonsense"], "--nonsense is unknown"),
        (["--enable_ha"], "--enable_ha needs the address of etcd"),
        (["--config_path=/nonexistent/master.json"], "cannot be read"),
        (["--rpc_interface=absent0", "--port=0", "--metrics_port=0"], "absent0"),
        (["--log_dir=/nonexistent", "--port=0"], "--log_dir=/nonexistent"),
        (["--rpc_address=203.0.113.1", "--port=0", "--metrics_port=0"], "203.0.113.1"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], part: str) -> None:
    assert part in one_sentence(run(*arguments))


def test_help_and_version() -> None:
    found = run("--help")
    assert found.returncode == 0
    assert "-rpc_port (" in found.stdout
    found = run("--version")
    assert found.returncode == 0
    assert re.fullmatch(r"mooncake_master version \d+\.\d+\.\d+\S* \(git: .*\)\n", found.stdout)


def test_interface_and_journal(tmp_path: Path) -> None:
    running = Master("--rpc_interface=lo", f"--log_dir={tmp_path}", "--alsologtostderr", "--noenable_metric_reporting")
    try:
        assert "rpc_interface=lo" in running.lines[-1]
        running.admin_port()
    finally:
        assert running.end()[0] == 0
    journal = (tmp_path / "mooncake_master.INFO").read_text()
    assert os.readlink(tmp_path / "mooncake_master.INFO").startswith("mooncake_master.")
    assert "Master service started on port" in journal
    assert "Shutdown signal received" in journal
    assert "Master Admin Metrics" not in journal


def test_heavy_libraries_come_after_the_service() -> None:
    """What start-up may import decides how soon the port answers."""
    code = "import sys, mooncake.cli.master; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"aiohttp", "prometheus_client", "numpy", "rich", "yaml"} & set(loaded)
