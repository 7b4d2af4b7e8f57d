"""docs/tenants.md and docs/draining.md say what is so."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake.master.drains import STATES
from mooncake.master.metric_table import COUNTERS, OWN_GAUGES, TENANT_GAUGES
from tests.processes import BIN, free_port, wait_until

DOCS = Path(__file__).parents[2] / "docs"
TENANTS, DRAINING = ((DOCS / name).read_text() for name in ("tenants.md", "draining.md"))


@pytest.fixture
def start_client(cleanup):
    """A `mooncake_client` with the flags of a documented line."""

    def start(line: str, master, port: int) -> None:
        flags = [flag for flag in line.split()[1:] if flag != "&" and not flag.startswith("--port")]
        argv = [BIN / "mooncake_client", *flags, f"--port={port}", f"--master_server_address={master.address}"]
        client = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        cleanup.callback(client.wait)
        cleanup.callback(client.terminate)
        wait_until(lambda: f":{port}\n" in master.get("/get_all_segments"), what="the segment")

    return start


def lines(page: str, start: str) -> list[str]:
    return [line.strip() for line in page.splitlines() if line.startswith(f"    {start}")]


def curl(master, line: str, **replaced: str) -> dict:
    """Run a documented command; what it answers."""
    for name, value in {"127.0.0.1:9003": f"127.0.0.1:{master.metrics_port}", **replaced}.items():
        line = line.replace(name, value)
    done = subprocess.run(["sh", "-c", line.replace("curl ", "curl -s ")], capture_output=True, timeout=20, check=True)
    answer = json.loads(done.stdout)
    assert answer["success"] is True, answer
    return answer


@pytest.mark.slow
def test_tenants(make_master, start_client, tmp_path):
    (policy,) = re.findall(r"```yaml\n(.*?)```", TENANTS, re.DOTALL)
    path = tmp_path / "quotas.yaml"
    path.write_text(policy)
    started, with_credentials = lines(TENANTS, "mooncake_master")
    assert with_credentials.startswith(started.removesuffix("&"))
    assert "/tmp/quotas.yaml" in policy
    master = make_master(*started.replace("/tmp/quotas.yaml", str(path)).split()[1:-1])
    start_client(lines(TENANTS, "mooncake_client")[0], master, free_port())
    (example,) = re.findall(r"```python\n(.*?)```", TENANTS, re.DOTALL)
    subprocess.run([sys.executable, "-c", example.replace("127.0.0.1:50051", master.address)], timeout=60, check=True)
    put, listed, removed, deleted = [curl(master, line) for line in lines(TENANTS, "curl")]
    assert put["data"]["requested_quota_bytes"] == 100 << 20
    assert [each["tenant_id"] for each in listed["data"]] == ["team-a", "team-b", "team-c"]
    assert removed["removed_count"] == 0
    assert deleted["data"]["tenant_id"] == "team-c"
    assert set(put["data"]) <= set(re.findall(r"`(\w+)`", TENANTS))


@pytest.mark.slow
def test_draining(make_master, start_client):
    master = make_master()
    names = {}
    for line in lines(DRAINING, "mooncake_client"):
        port = free_port()
        names[re.search(r"--port=(\d+)", line)[1]] = str(port)
        start_client(line, master, port)
    begin, query, cancel, status = lines(DRAINING, "curl")
    job = curl(master, begin, **names)["job_id"]
    wait_until(lambda: curl(master, query, JOB=job)["status_name"] == "SUCCEEDED", what="the job")
    assert curl(master, status, **names)["status_name"] == "DRAINED"
    assert set(STATES) <= set(re.findall(r"`(\w+)`", DRAINING))
    assert "/cancel?job_id=JOB" in cancel


def test_the_metrics_exist():
    names = set(re.findall(r"`(mooncake_(?:tenant|drain)_\w+)`", TENANTS + DRAINING))
    assert names == {
        name for name in TENANT_GAUGES | COUNTERS | OWN_GAUGES if name.startswith(("mooncake_tenant", "mooncake_drain"))
    }
