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
