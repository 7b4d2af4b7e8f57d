"""docs/security.md: its commands run as they stand."""

import os
import re
import subprocess
from pathlib import Path

from tests.processes import BIN, free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_the_example_runs():
    (example,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    rpc, http = str(free_port()), str(free_port())
    script = example.replace("50071", rpc).replace("9071", http)
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    refused, summary = done.stdout.split("}", 1)
    assert "needs the header Authorization: Bearer" in refused
    assert "role=leader, state=serving" in summary
    assert "knows no secret" not in done.stderr


def test_the_example_with_tls_runs(tmp_path):
    (example,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    rpc, http = str(free_port()), str(free_port())
    script = example.replace("50071", rpc).replace("9071", http).replace("/tmp/mooncake-tls", str(tmp_path))
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert "role=leader, state=serving" in done.stdout
    assert "this port speaks TLS; set MOONCAKE_TLS_CERT" in done.stdout.splitlines()[-1]
