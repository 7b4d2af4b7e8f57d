"""Loads that are declined, KV events, and metrics, against vLLM's real scheduler; see watching.py."""

import pytest

from tests.connector.in_vllm import run

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("scenario", ["slow_loads", "events", "metrics", "restarts"])
def test_watching(python, model, scenario):
    assert run(python, "watching", model, scenario, limit=220).splitlines()[-1] == "done"
