"""docs/snapshots.md says what is so."""

import re
import subprocess
from pathlib import Path

from mooncake.master.flag_table import BY_NAME
from mooncake.master.metric_table import COUNTERS, GAUGES, OWN_GAUGES
from mooncake.master.snapshots import settings
from tests.processes import BIN, Master
from tests.snapshots.masters import names, take

PAGE = (Path(__file__).parents[2] / "docs" / "snapshots.md").read_text()


def test_the_commands_run(tmp_path, monkeypatch, cleanup):
    """With other ports and another folder."""
    lines = [line.strip() for line in PAGE.splitlines() if line.startswith("    ")]
    (variable,) = re.findall(r"export (\w+)=/tmp/mooncake-snapshots", PAGE)
    monkeypatch.setenv(variable, str(tmp_path / "s"))
    command = next(line for line in lines if "local" in line and line.startswith("mooncake_master "))
    master = Master(*command.removeprefix("mooncake_master ").rstrip(" &").split())
    cleanup.callback(master.stop)
    assert "curl -s -X POST http://127.0.0.1:9003/api/v1/snapshots" in lines
    name = take(master)
    assert names(tmp_path / "s" / "mooncake_cluster") == [name]
    command = next(line for line in lines if "=s3" in line)
    for flag in re.findall(r"--(\w+)", command):
        assert flag in BY_NAME


def test_what_is_named_exists():
    metrics = COUNTERS.keys() | GAUGES.keys() | OWN_GAUGES.keys()
    found = set(re.findall(r"`(mooncake_\w+)`", PAGE[PAGE.index("## Metrics") :]))
    assert len(found) == 8
    assert found <= metrics
    assert set(re.findall(r"`--(\w+)", PAGE)) <= BY_NAME.keys()
    source = Path(settings.__file__).read_text()
    for name in set(re.findall(r"MOONCAKE_AWS_(\w+)", PAGE)):
        assert f'"{name}' in source


def test_a_master_says_what_is_wrong_and_ends(monkeypatch):
    monkeypatch.delenv(settings.PATH_VARIABLE, raising=False)
    done = subprocess.run(
        [BIN / "mooncake_master", "--enable_snapshot", "--snapshot_object_store_type=local", "--port=0"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert settings.PATH_VARIABLE in done.stderr
    assert done.stderr.count("\n") == 1
