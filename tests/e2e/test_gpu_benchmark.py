"""`python -m benchmarks.gpu` on CPUs, with a tiny model: every part, engines that fail among others that do not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu import cold, hits, latency
from benchmarks.gpu.__main__ import parser

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--device", "cpu", "--lengths", "256,512", "--repeats", "1", "--together", "2", "--together-length", "256"),
    *("--cold-length", "512", "--cold-repeats", "2", "--latency-repeats", "1", "--streams", "4", "--window", "0.3"),
    *("--stream-length", "64", "--kv-gib", "0.0625", "--pool-gib", "0.25", "--batched-tokens", "2048"),
]


def options(**more):
    made = parser().parse_args(["--model", "none", *SMALL])
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_parts(python, model, tmp_path):
    """vLLM's offloading refuses CPUs: that is told, and the rest is measured."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--model", model, "--python", python, "--trace", *SMALL]
    command += ["--configurations", "none,offload,ours,other", "--out", tmp_path / "out", "--limit", "250"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 1, done.stderr
    assert "offload FAILED" in done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(found["failures"]) == ["offload"], found["failures"]
    for length in ("256", "512"):
        rows = found["hits"][length]
        assert list(rows) == ["none", "ours", "other"]
        assert rows["ours"]["cold cached"] == [0]
        for name in ("ours", "other"):
            assert rows[name]["pool cached"] == [int(length)]
            assert rows[name]["same"] == [True]
    assert found["together"]["ours"]["cached"] == [512, 512]
    assert [len(found["cold"][name]) for name in ("none", "ours", "none again")] == [2, 2, 2]
    assert found["latency"]["ours"]["pool"]["cached"] == [512]
    assert len(found["latency"]["none"]["cold"]["gaps"]) > 20
    assert "kv_transfer request=" in (tmp_path / "out" / "ours.log").read_text()
    assert "gaps between tokens of 4 streams" in done.stdout
    assert str(tmp_path / "out") in done.stdout
    left = subprocess.run(["pgrep", "-f", str(model)], capture_output=True, text=True, check=False).stdout
    assert not left, "engines that outlive the run"


def test_a_pool_hit_is_held_against_the_bus(tmp_path):
    """4 layers, 2 heads of 64: 4 KiB a token."""
    config = {"num_hidden_layers": 4, "num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    row = {"cold": [90.0], "hot": [10.0], "pool": [30.0], "pool cached": [1000], "same": [True]}
    results = {"1000": {"offload": {"hot": [5.0], "pool": [20.0], "pool cached": [1000]}, "ours": row}}
    (line,) = [each for each in hits.show(results, options(model=str(tmp_path)), 1.0) if " ours " in each]
    assert line.split()[:9] == ["1000", "ours", "90.0", "10.0", "30.0", "21.3", "MISSED", "1.50", "0.2"]
    assert line.endswith("the same")
    (line,) = [each for each in hits.show(results, options(model=str(tmp_path)), 0.2) if " ours " in each]
    assert line.split()[5:7] == ["42.6", "met"]


def test_cold_ratios_are_to_both_runs_without_a_connector():
    lines = cold.show({"none": [100.0, 90.0], "none again": [110.0, 90.0], "ours": [105.0, 99.0]}, options())
    assert "A/A 1.050 (1.000 to 1.100)" in lines[1]
    assert "ours         102.0   1.050 (1.000 to 1.100), limit 1.03: MISSED" in lines[2]


def test_gaps_are_compared_like_with_like():
    phase = {"first": [5.0], "cached": [0]}
    results = {
        "none": {"cold": {"gaps": [100.0] * 50, **phase}},
        "ours": {
            "pool": {"gaps": [12.0] * 50, **phase},
            "GPU hit": {"gaps": [10.0] * 50, **phase},
            "cold": {"gaps": [110.0] * 50, **phase},
        },
    }
    lines = latency.show(results, options())
    assert "p99 1.20 of a GPU hit (limit 1.15: MISSED)" in lines[3]
    assert "p99 1.10 of cold without a connector (limit 1.15: met)" in lines[5]
