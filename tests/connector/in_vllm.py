"""Runs modules of these tests in the vLLM environment."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(python: Path, module: str, *arguments: object, limit: float) -> str:
    """What `python -m tests.connector.<module>` prints, which must end well within `limit` seconds."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [python, "-m", f"tests.connector.{module}", *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    assert result.returncode == 0, result.stderr[-6000:]
    return result.stdout
