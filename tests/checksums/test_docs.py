"""docs/checksums.md: its commands run as they stand."""

import os
import re
import subprocess
from pathlib import Path

from tests.processes import BIN, free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checksums.md").read_text()


def test_the_example_runs():
    (example,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    script = example.replace("50072", str(free_port())).replace("9072", str(free_port()))
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "b'value'\nmooncake_checksum_mismatches_total 0\n"
