"""docs/ssd.md says what is so."""

import re
import subprocess
import sys
from pathlib import Path

from mooncake.master.metric_table import COUNTERS, GAUGES, OWN_GAUGES

PAGE = (Path(__file__).parents[2] / "docs" / "ssd.md").read_text()


def test_the_example_runs(make_master):
    master = make_master("--enable_offload")
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "127.0.0.1:50051" in example
    subprocess.run([sys.executable, "-c", example.replace("127.0.0.1:50051", master.address)], timeout=60, check=True)


def test_the_commands_run(make_master, cleanup, tmp_path, make_worker):
    """The second one, with the first one's flag."""
    from tests.processes import BIN, wait_until

    master = make_master("--enable_offload")
    line = next(line for line in PAGE.splitlines() if "mooncake_client --host" in line)
    flags = line.partition("mooncake_client ")[2].rstrip(" &").split()
    variable = re.search(r"(MOONCAKE_\w+)=", line)
    assert variable is not None
    client = subprocess.Popen(
        [BIN / "mooncake_client", *flags, f"--master_server_address={master.address}"],
        env={variable[1]: str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        stderr=subprocess.DEVNULL,
    )
    cleanup.callback(client.wait)
    cleanup.callback(client.terminate)
    wait_until(lambda: master.metric("mooncake_disk_tiers") == 1)
    worker = make_worker(at=master)
    assert worker("result = store.put('k', b'v' * 5000)") == 0
    wait_until(lambda: master.metric("file_cache_nums_") == 1)
    assert list(tmp_path.glob("tier-0/*.data"))


def test_the_metrics_exist():
    text = PAGE[PAGE.index("## Metrics") :]
    names = re.findall(r"`((?:master|file|mooncake)_\w+)`", text)
    assert len(names) > 15
    assert set(names) <= COUNTERS.keys() | GAUGES.keys() | OWN_GAUGES.keys()
