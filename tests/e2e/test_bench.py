"""`mooncake bench xpyd` with real vLLM: KV cache goes from prefill to decode, and the report says so."""

import json
import shlex

import pytest

from mooncake.cli.engine_settings import API_SERVER
from tests.bench.commands import Command
from tests.processes import gone, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def test_1p1d(python, model, tmp_path):
    engine = shlex.join([str(python), "-P", "-m", API_SERVER])
    command = Command(
        "xpyd", "--model", model, "--steps", "1P1D", "--device", "cpu", "--engine", engine, "--requests", 10,
        "--rate", 5, "--input-len", "70:200", "--output-len", 8, "--kv-cache-size", "64MB", "--segment-size", "64MB",
        "--output", tmp_path / "out",
    )  # fmt: skip
    try:
        command.read_until("1P1D: ready")
        pids = command.below()
        code, out, err = command.end(limit=120)
    finally:
        command.close()
    assert (code, err) == (0, ""), out
    wait_until(lambda: all(map(gone, pids)), 5, "the end of everything that was started")
    (step,) = json.loads((tmp_path / "out" / "results.json").read_text())["steps"]
    assert (step["answers"], step["errors"]) == (10, 0)
    sources = step["decode_prompt_tokens_by_source"]
    assert sources["prefill"] > 500, "decode has the prompts from prefill"
    assert sources["computed"] < 0.1 * sources["prefill"]
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert step["milliseconds"][metric]["p99"] > 0
