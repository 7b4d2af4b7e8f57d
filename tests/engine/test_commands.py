"""The commands `transfer_engine_bench` and `transfer_engine_topology_dump`, as users start them."""

import json
import re
import signal
import subprocess

import pytest

from mooncake.http_metadata_server import KVBootstrapServer
from tests.processes import BIN, free_port

BENCH, DUMP = str(BIN / "transfer_engine_bench"), str(BIN / "transfer_engine_topology_dump")
HERE = "--local_server_name=127.0.0.1"


def run(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture(params=["by address", "by name"])
def names(request, cleanup):
    """Flags of the target and of the initiator."""
    if request.param == "by address":
        return [HERE], [HERE]
    server = KVBootstrapServer(0, "127.0.0.1")
    server.run()
    cleanup.callback(server.close)
    there = f"--metadata_server=http://127.0.0.1:{server.port}/metadata"
    return [f"{HERE}:{free_port()}", there], [f"{HERE}:{free_port()}", there]


def test_target_and_initiator(names):
    of_target, of_initiator = names
    target = subprocess.Popen(
        [BENCH, "-mode", "target", *of_target, "--buffer_size=16MB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        session = re.search(r"--segment_id=(\S+)", target.stdout.readline())[1]
        for operation, unit in (("read", "MiB"), ("write", "GB")):
            done = run(
                BENCH, f"--segment_id={session}", *of_initiator, "--buffer_size=16MB", "--batch_size=50",
                "--block_size=4096", "--threads=2", "--duration=0.3", f"--operation={operation}",
                "-report_unit", unit, "--noauto_discovery",
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
        (["--mode=target", "--metadata_server=127.0.0.1:1"], "etcd at 127.0.0.1:1 cannot be reached"),
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
