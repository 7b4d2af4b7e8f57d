"""Random orders of events against vLLM's real scheduler; see storm.py."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
STEPS = 3000


@pytest.mark.parametrize("seed", range(int(os.environ.get("STORM_SEEDS", "3"))))
def test_storm(python, model, seed):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [python, "-m", "tests.connector.storm", model, str(seed), str(STEPS)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert result.returncode == 0, result.stderr[-6000:]
    counts = json.loads(result.stdout.splitlines()[-1])
    for event in ("blocks loaded", "blocks saved", "aborts", "preemptions", "values checked"):
        assert counts[event] > 0, counts
    assert counts["steps"] == STEPS
    assert not counts["slow closes"]
