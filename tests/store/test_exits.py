"""Processes that end without closing anything: exit code 0, a clean stderr, and nothing is left (fault U014)."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake.errors import ConfigError
from mooncake.transfer.memory import SegmentMemory
from tests.processes import wait_until

PUT_AND_GET = """
import builtins, sys, threading
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", sys.argv[1]) == 0
key = f"k{sys.argv[2]}"
here = ReplicateConfig()
here.preferred_segment = store.get_hostname()  # others' segments end at any moment
assert store.put(key, b"v" * 10_000, here) == 0
assert len(store.get(key)) == 10_000
"""
WAYS = {
    "in the module": "",
    "outlived by": "builtins.kept = store",
    "in a cycle": "class A: pass\na = A(); a.a, a.store = a, store",
    "a buffer": "builtins.kept = store.get_buffer(key)",
    "a session": "assert store.batch_put_session_start(['s' + key], [1000]) == [0]",
    "its client": "builtins.kept = store._client",
    "a thread that reads": "def read():\n  while True: store.get(key)\n"
    "threading.Thread(target=read, daemon=True).start()",
    "an error": "import atexit; atexit.register(lambda: store.get(key))",
    "a failed setup": "builtins.kept = MooncakeDistributedStore()\n"
    "assert kept.setup('127.0.0.1', 'P2PHANDSHAKE', 1 << 50, 1 << 20, 'tcp', '', sys.argv[1]) != 0",
}


def run(master, way: str, number: int) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PUT_AND_GET + WAYS[way], master.address, str(number)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("way", WAYS)
def test_exit_without_close(master, way):
    done = run(master, way, 0)
    said = [line for line in done.stderr.splitlines() if way != "a failed setup" or "setup failed" not in line]
    assert (done.returncode, said) == (0, [])
    wait_until(lambda: master.metric("master_total_capacity_bytes") == 0, 15, "the end of its segment")


@pytest.mark.slow
def test_fifty_exits_without_close(master):
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(lambda number: run(master, "in the module", number), range(50)):
            assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: master.metric("master_total_capacity_bytes") == 0, 15, "the end of all segments")


@pytest.mark.filterwarnings("error")
def test_memory_that_cannot_be_mapped_goes_without_a_word(capfd):
    with pytest.raises(OSError, match="No such device"):
        SegmentMemory(os.open("/dev/null", os.O_RDWR), os.open("/dev/null", os.O_RDWR), 1 << 20)
    with pytest.raises(ConfigError, match="smaller"):
        SegmentMemory.create(1, 1 << 60)
    assert capfd.readouterr().err == ""
