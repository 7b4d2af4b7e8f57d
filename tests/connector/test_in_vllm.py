"""What runs in the vLLM environment, against its real scheduler and with its tensors; see storm.py and sharing.py."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
STEPS = 3000


SEEDS = range(int(os.environ.get("STORM_SEEDS", "1")))
KINDS = ("full", "window", "hybrid", "sizes", "mamba", "lagging", "untold")  # see kinds.py, which needs vLLM


def run(python, module, *arguments) -> str:
    """Output of a module in the vLLM environment."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [python, "-m", f"tests.connector.{module}", *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert result.returncode == 0, result.stderr[-6000:]
    return result.stdout


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_storm(python, model, kind, seed):
    counts = json.loads(run(python, "storm", model, seed, STEPS, kind).splitlines()[-1])
    checked = [count for event, count in counts.items() if event.startswith("values checked")]
    for count in (*checked, *(counts[event] for event in ("blocks loaded", "blocks saved", "aborts", "preemptions"))):
        assert count > 0, counts
    assert checked, counts
    assert counts["steps"] == STEPS
    assert not counts["slow closes"]


def test_sizes_of_tensor_parallelism_share(python, model):
    """See sharing.py."""
    assert run(python, "sharing", model).count(": shared") == 3
