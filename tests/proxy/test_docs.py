"""The commands of docs/proxy.md work when they are pasted."""

import os
import re
import signal
import subprocess
from pathlib import Path

from tests.processes import BIN, free_port, wait_until
from tests.proxy.processes import http

PAGE = Path(__file__).parents[2] / "docs" / "proxy.md"


def _commands() -> list[str]:
    """Indented commands, with their continuation lines."""
    text = re.sub(r"\\\n\s+", "", PAGE.read_text())
    return [line.strip() for line in text.splitlines() if re.match(r"    (mooncake_proxy|export|curl) ", line)]


def test_commands(make_engine):
    ports = {name: str(make_engine().port) for name in ("8100", "8101", "8200", "8201", "8202")}
    ports["8998"] = ports["8100"]
    ports["8000"] = str(free_port())
    commands = [re.sub(r"\b8\d{3}\b", lambda found: ports[found.group()], command) for command in _commands()]
    proxies = [command for command in commands if command.startswith("mooncake_proxy")]
    asked = [command for command in commands if command.startswith("curl")]
    assert len(proxies) == 2
    assert len(asked) == 4
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "ADMIN_API_KEY": "secret"}
    url = f"http://127.0.0.1:{ports['8000']}"
    for command in proxies:
        process = subprocess.Popen(["sh", "-c", f"exec {command}"], env=environment)
        try:
            wait_until(lambda: _is_ready(url), what=command)
            if command is proxies[-1]:
                for one in asked:
                    run = subprocess.run(["sh", "-c", one], env=environment, capture_output=True, text=True, timeout=20)
                    assert run.returncode == 0, run.stderr
                    assert "error" not in run.stdout.replace('"last_error":""', "")
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0


def _is_ready(url: str) -> bool:
    try:
        status = http(url + "/status")[2]
    except OSError:
        return False
    return all(one["state"] == "ready" for one in status["prefill"] + status["decode"])
