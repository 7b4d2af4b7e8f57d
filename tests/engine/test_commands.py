"""The commands `transfer_engine_bench` and `transfer_engine_topology_dump`, as users start them."""

import json
import re
import signal
import subprocess

import pytest

from tests.processes import BIN

BENCH, DUMP = str(BIN / "transfer_engine_bench"), str(BIN / "transfer_engine_topology_dump")
HERE = "--local_server_name=127.0.0.1"


def run(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def test_target_and_initiator():
    target = subprocess.Popen(
        [BENCH, "-mode", "target", HERE, "--buffer_size=16MB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        session = re.search(r"--segment_id=(\S+)", target.stdout.readline())[1]
        for operation, unit in (("read", "MiB"), ("write", "GB")):
            done = run(
                BENCH, f"--segment_id={session}", HERE, "--buffer_size=16MB", "--batch_size=50", "--block_size=4096",
                "--threads=2", "--duration=0.3", f"--operation={operation}", "-report_unit", unit, "--noauto_discovery",
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert re.search(rf"batch count [1-9]\d*, throughput [\d.]+ {unit}/s$", done.stdout.strip())
    finally:
        target.send_signal(signal.SIGTERM)
        _, errors = target.communicate(timeout=10)
    assert target.returncode == 0
    assert not errors


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--backend=tent", "--segment_id=x:1"], "--backend"),
        (["--nic_priority_matrix={}", "--segment_id=x:1"], "--nic_priority_matrix"),
        ([], "--segment_id"),
        (["--segment_id=127.0.0.1:1", "--buffer_size=1MB"], "--buffer_size"),
        (["--segment_id=127.0.0.1:1", "--threads=0"], "--threads"),
        (["--segment_id=127.0.0.1:1", "--buffer_size=128MB"], "127.0.0.1:1 cannot be reached"),
        (["--mode=target", "--metadata_server=10.0.0.1:2379"], "metadata server"),
        (["--mode=target", "--use_vram"], "--use_vram"),
    ],
)
def test_what_is_refused(flags, word):
    done = run(BENCH, HERE, *flags)
    assert done.returncode != 0
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_topology_dump(tmp_path):
    done = run(DUMP)
    assert done.returncode == 0
    assert done.stdout.startswith("Local topology [te/discover]: {")
    assert "cpu:0" in json.loads(done.stdout.partition(": ")[2])
    custom = tmp_path / "topology.json"
    custom.write_text('{"cpu:0": [["nic"], []]}')
    assert '["nic"]' in run(DUMP, "--use-custom-topo", "--custom-topo-json", str(custom)).stdout
    for flags in (["--backend", "tent"], ["--use-custom-topo"], ["--use-custom-topo", "--custom-topo-json", "/none"]):
        assert run(DUMP, *flags).returncode == 1
