"""What a master that began with a snapshot knows beyond the segments' tables, and what it does with damaged ones."""

import os
import resource
import signal
import time
from pathlib import Path

import pytest

from mooncake.master.snapshots.settings import PATH_VARIABLE
from tests.processes import children, stop, wait_until

MIB = 1 << 20
WRITE = ("--enable_snapshot", "--snapshot_object_store_type=local", "--snapshot_interval_seconds=1")
RESTORE = "--enable_snapshot_restore"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "snapshots"))
    return tmp_path / "snapshots" / "mooncake_cluster"


def written(master) -> int:
    return int(master.metric("mooncake_snapshots_written_total"))


def wait_for_snapshot(master) -> None:
    """One that began after this call."""
    before = written(master)
    wait_until(lambda: written(master) >= before + 2, 15, "a snapshot")


def restart(master, *flags: str) -> None:
    master.kill()
    master._flags = (*master._flags, *flags)
    master.start()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("restored", [True, False], ids=["restored", "not restored"])
def test_what_was_removed_while_its_segment_was_away_stays_removed(folder, make_master, make_store, restored):
    """Without the snapshot the segment's table brings it back."""
    master = make_master(*WRITE, "--client_ttl=1", "--default_kv_lease_ttl=200")
    store = make_store(0, at=master)
    server = make_store(4 * MIB, at=master)
    assert store.put("removed", b"r" * 1000) == 0
    assert store.put("kept", b"k" * 1000) == 0
    (segment_server,) = [pid for pid in children(os.getpid()) if "segment" in command_line(pid)]
    stop(segment_server)
    try:
        wait_until(lambda: master.get("/get_all_segments").strip() == "", 10, "the segment's end")
        assert store.remove("removed") == -704
        wait_for_snapshot(master)
        restart(master, RESTORE if restored else f"--no{RESTORE[2:]}")
    finally:
        os.kill(segment_server, signal.SIGCONT)
    wait_until(lambda: server.is_exist("kept") == 1, 10, "the return of the segment")
    assert store.get("kept") == b"k" * 1000
    assert store.is_exist("removed") == (0 if restored else 1)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def test_values_leave_in_the_order_of_their_use_before_the_restart(folder, make_master, make_store, tmp_path):
    flags = (*WRITE, RESTORE, "--default_kv_lease_ttl=50", "--eviction_high_watermark_ratio=1")
    master = make_master(*flags, log=tmp_path / "log")
    store = make_store(8 * MIB, at=master)
    for i in range(7):
        assert store.put(f"k{i}", bytes([i]) * MIB) == 0
    time.sleep(0.1)
    for name in ("k0", "k2", "k1"):  # k3 .. k6 were used before these
        assert store.get(name) == bytes([int(name[1])]) * MIB
        time.sleep(0.05)
    wait_for_snapshot(master)
    restart(master)
    assert master.metric("mooncake_snapshot_restores_total") == 1
    wait_until(lambda: int(master.metric("master_key_count")) == 7, 5)
    wait_until(lambda: "segments of the snapshot are back" in (tmp_path / "log").read_text(), 5)
    for i in range(5):
        wait_until(lambda i=i: store.put(f"n{i}", b"n" * MIB) == 0, 5)
    found = [i for i in range(7) if store.is_exist(f"k{i}") == 1]
    assert found == [0, 1, 2]


def test_snapshots_are_kept_up_to_a_number_and_a_damaged_one_is_not_used(folder, make_master, make_store, tmp_path):
    log = tmp_path / "log"
    master = make_master(*WRITE, "--snapshot_retention_count=3", log=log)
    store = make_store(MIB, at=master)
    assert store.put("k", b"v") == 0
    wait_until(lambda: written(master) >= 4, 15)
    wait_until(lambda: len(names(folder)) == 3, 5)
    master.kill()
    for part in folder.glob("*.part"):
        part.unlink()
    oldest, middle, newest = names(folder)
    (folder / newest).write_bytes((folder / newest).read_bytes()[:-5])
    raw = bytearray((folder / middle).read_bytes())
    raw[len(raw) // 2] ^= 4
    (folder / middle).write_bytes(raw)
    master._flags = (*master._flags, RESTORE, "--snapshot_interval_seconds=600")
    master.start()
    assert master.metric("mooncake_snapshots_damaged_total") == 2
    assert master.metric("mooncake_snapshot_restores_total") == 1
    text = log.read_text()
    assert f"{newest}: it is cut short" in text
    assert f"{middle}: the checksum of block" in text
    assert f"began with snapshot {oldest}" in text
    assert names(folder) == [
        oldest, middle.replace(".snapshot", ".damaged"), newest.replace(".snapshot", ".damaged")
    ]  # fmt: skip
    wait_until(lambda: store.get("k") == b"v", 5)


def test_a_disk_that_is_full(folder, make_master, make_store, tmp_path):
    """The master goes on and says it once; when there is room again, snapshots are written again."""
    log = tmp_path / "log"
    master = make_master(*WRITE, log=log)
    store = make_store(MIB, at=master)
    wait_until(lambda: written(master) >= 1, 10)
    (before, *_) = names(folder)
    unlimited = resource.prlimit(master.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(master.process.pid, resource.RLIMIT_FSIZE, (log.stat().st_size + 4096, unlimited[1]))
    big = [f"{i:04d}" * 60 for i in range(200)]
    store.remove(big[0])  # each leaves a tombstone
    for key in big:
        assert store.remove(key) == -704
    wait_until(lambda: master.metric("mooncake_snapshots_failed_total") >= 2, 15)
    assert store.put("k", b"v") == 0
    assert store.get("k") == b"v"
    assert not list(folder.glob("*.part"))
    resource.prlimit(master.process.pid, resource.RLIMIT_FSIZE, unlimited)
    wait_for_snapshot(master)
    text = log.read_text()
    assert text.count("a snapshot could not be written") == 1
    assert "File too large" in text
    assert "snapshots are written again" in text
    assert before


def test_a_master_killed_at_any_moment_begins_with_a_whole_snapshot(folder, make_master, make_store):
    master = make_master(*WRITE, RESTORE)
    store = make_store(MIB, at=master)
    assert store.put("k", b"v") == 0
    wait_until(lambda: written(master) >= 1, 10)
    for i in range(6):
        wait_until(lambda: children(master.process.pid), 10, "a child that writes")
        time.sleep(0.02 * i)
        restart(master)
        assert master.metric("mooncake_snapshots_damaged_total") == 0
        assert master.metric("mooncake_snapshot_restores_total") == 1
        wait_until(lambda: store.get("k") == b"v", 5)


def test_a_child_that_hangs_is_killed(folder, make_master):
    master = make_master(*WRITE, "--snapshot_child_timeout_seconds=1")
    (child,) = wait_until(lambda: children(master.process.pid), 10, "a child that writes")
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: master.metric("mooncake_snapshots_failed_total") >= 1, 10)
    assert child not in children(master.process.pid)
    wait_until(lambda: written(master) >= 1, 10)
