"""docs/warm_pool.md: its commands run as they stand."""

import os
import re
import subprocess
from pathlib import Path

from tests.processes import BIN, free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "warm_pool.md").read_text()


def test_the_example_runs(tmp_path):
    (example,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    script = example.replace("50073", str(free_port())).replace("9073", str(free_port()))
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["found b''", "found b'value'"]
    assert lines[2].split() == ["segment", "MiB", "seconds", "left", "process"]
    name, size, left, _ = lines[3].split()
    assert size == "64"
    assert 290 < int(left) <= 300
    assert lines[4:] == [f"{name}: ended"]
