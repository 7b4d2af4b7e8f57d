"""Random orders of events against vLLM's real scheduler; see storm.py."""

import json
import os

import pytest

from tests.connector.in_vllm import run

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 3000
SEEDS = range(int(os.environ.get("STORM_SEEDS", "1")))
KINDS = ("full", "window", "hybrid", "sizes", "mamba", "lagging", "untold")  # see kinds.py, which needs vLLM


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_storm(python, model, kind, seed):
    counts = json.loads(run(python, "storm", model, seed, STEPS, kind, limit=380).splitlines()[-1])
    checked = [count for event, count in counts.items() if event.startswith("values checked")]
    for count in (*checked, *(counts[event] for event in ("blocks loaded", "blocks saved", "aborts", "preemptions"))):
        assert count > 0, counts
    assert checked, counts
    assert counts["steps"] == STEPS
    assert not counts["slow closes"]
