"""Random orders of events between prefill and decode, against vLLM's real scheduler; see push_storm.py."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
STEPS = 4000


@pytest.mark.parametrize("seed", range(int(os.environ.get("STORM_SEEDS", "2"))))
def test_storm(python, model, seed):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [python, "-m", "tests.connector.push_storm", model, str(seed), str(STEPS)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert result.returncode == 0, result.stderr[-6000:]
    counts = json.loads(result.stdout.splitlines()[-1])
    for event in ("pushes", "aborts", "external", "stops", "forced preemptions"):
        assert counts[event] > 0, counts
