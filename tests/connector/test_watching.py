"""Loads that are declined, KV events, and metrics, against vLLM's real scheduler; see watching.py."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("scenario", ["slow_loads", "events", "metrics"])
def test_watching(python, model, scenario):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [python, "-m", "tests.connector.watching", model, scenario]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=220, check=False)
    assert result.returncode == 0, result.stderr[-6000:]
    assert result.stdout.splitlines()[-1] == "done"
