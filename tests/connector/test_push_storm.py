"""Random orders of events between prefill and decode, against vLLM's real scheduler; see push_storm.py."""

import json
import os

import pytest

from tests.connector.in_vllm import run

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4000


@pytest.mark.parametrize("seed", range(int(os.environ.get("STORM_SEEDS", "2"))))
def test_storm(python, model, seed):
    counts = json.loads(run(python, "push_storm", model, seed, STEPS, limit=580).splitlines()[-1])
    for event in ("pushes", "aborts", "external", "stops", "forced preemptions"):
        assert counts[event] > 0, counts
