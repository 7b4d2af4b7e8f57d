"""What a master that began with a snapshot knows beyond the segments' tables, and what it does with damaged ones."""

import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from mooncake.master.snapshots.settings import PATH_VARIABLE
from mooncake.store import MooncakeDistributedStore
from tests.processes import children, stop, wait_until
from tests.snapshots.masters import LOCAL, RESTORE, names, restart, take, wait_for_log

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "snapshots"))
    return tmp_path / "snapshots" / "mooncake_cluster"


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


@pytest.mark.parametrize("restored", [True, False], ids=["restored", "not restored"])
def test_what_was_removed_while_its_segment_was_away_stays_removed(folder, make_master, make_store, restored):
    """Without the snapshot the segment's table brings it back."""
    master = make_master(*LOCAL, "--client_ttl=1", "--default_kv_lease_ttl=200")
    store = make_store(4 * MIB, at=master)
    assert store.put("removed", b"r" * 1000) == 0
    assert store.put("kept", b"k" * 1000) == 0
    (server,) = [pid for pid in children(os.getpid()) if "segment" in command_line(pid)]
    stop(server)
    try:
        wait_until(lambda: master.get("/get_all_segments").strip() == "", 10, "the segment's end")
        assert store.remove("removed") == -704
        assert take(master).endswith(".snapshot")
        restart(master, *[RESTORE] if restored else [])
    finally:
        os.kill(server, signal.SIGCONT)
    wait_until(lambda: store.get("kept") == b"k" * 1000, 10, "the return of the segment")
    assert store.is_exist("removed") == (0 if restored else 1)


@pytest.mark.parametrize("restored", [True, False], ids=["restored", "not restored"])
def test_what_a_tenant_removed_stays_removed(folder, make_master, tmp_path, cleanup, restored):
    """All of it, while the segment was away, and nothing of others'."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\ntenants:\n- {name: a, quota: 16MB}\n- {name: default, quota: 16MB}\n")
    flags = ("--enable_multi_tenants", f"--tenant_quota_connector_uri={policy}")
    master = make_master(*LOCAL, *flags, "--client_ttl=1", "--default_kv_lease_ttl=200")
    stores = []
    for segment, tenant in ((4 * MIB, "default"), (0, "a")):
        stores.append(MooncakeDistributedStore())
        cleanup.callback(stores[-1].close)
        arguments = "127.0.0.1", "P2PHANDSHAKE", segment, MIB, "tcp", "", master.address
        assert stores[-1].setup(*arguments, tenant_id=tenant) == 0
        assert stores[-1].put("k", tenant.encode()) == 0
    others, mine = stores
    (server,) = [pid for pid in children(os.getpid()) if "segment" in command_line(pid)]
    stop(server)
    try:
        wait_until(lambda: master.get("/get_all_segments").strip() == "", 10, "the segment's end")
        mine.remove_all(True)
        take(master)
        restart(master, *[RESTORE] if restored else [])
    finally:
        os.kill(server, signal.SIGCONT)
    wait_until(lambda: others.get("k") == b"default", 10, "the return of the segment")
    assert mine.is_exist("k") == (0 if restored else 1)
    assert mine.put("k", b"new") == 0
    assert mine.get("k") == (b"new" if restored else b"a")


def test_values_leave_in_the_order_of_their_use_before_the_restart(folder, make_master, make_store, tmp_path):
    log = tmp_path / "log"
    master = make_master(
        *LOCAL, RESTORE, "--default_kv_lease_ttl=500", "--eviction_high_watermark_ratio=1", log=log
    )  # fmt: skip
    store = make_store(8 * MIB, at=master)
    for i in range(7):
        assert store.put(f"k{i}", bytes([i]) * MIB) == 0
    time.sleep(0.6)
    for name in ("k0", "k2", "k1"):  # k3 to k6 were used before these
        assert store.get(name) == bytes([int(name[1])]) * MIB
        time.sleep(0.6)  # until the lease has ended
    take(master)
    restart(master)
    wait_for_log(log, "1 of 1 segments of the snapshot are back; it knew 7 values, there are 7")
    time.sleep(0.6)  # until readers of the former master are over
    for i in range(5):
        wait_until(lambda i=i: store.put(f"n{i}", b"n" * MIB) == 0, 5)
    assert [i for i in range(7) if store.is_exist(f"k{i}") == 1] == [0, 1, 2]


def test_a_task_outlives_the_master(folder, make_master, make_store, make_worker):
    master = make_master(*LOCAL, RESTORE)
    store = make_store(4 * MIB, at=master)
    make_worker(4 * MIB, at=master)
    assert store.put("k", b"v" * 1000) == 0
    names = master.get("/get_all_segments").split()
    task, code = store.create_copy_task("k", names)
    assert code == 0
    wait_until(lambda: store.query_task(task)[0].status == store.query_task(task)[0].status.SUCCESS, 5)
    take(master)
    restart(master)
    found, code = wait_until(lambda: store.query_task(task) if store.query_task(task)[1] == 0 else None, 5)
    assert (code, found.status) == (0, found.status.SUCCESS)
    wait_until(lambda: len(store.get_replica_desc("k")) == 2, 5)


def test_snapshots_are_kept_up_to_a_number_and_a_damaged_one_is_not_used(folder, make_master, make_store, tmp_path):
    log = tmp_path / "log"
    master = make_master(*LOCAL, "--snapshot_retention_count=3", log=log)
    store = make_store(MIB, at=master)
    assert store.put("k", b"v") == 0
    taken = [take(master) for _ in range(5)]
    assert names(folder) == taken[2:]
    assert master.metric("mooncake_snapshots_written_total") == 5
    assert master.metric("mooncake_snapshot_bytes") == (folder / taken[-1]).stat().st_size
    assert "Snapshots: Success=5, Fail=0" in master.get("/metrics/summary")
    oldest, middle, newest = taken[2:]
    (folder / newest).write_bytes((folder / newest).read_bytes()[:-5])
    raw = bytearray((folder / middle).read_bytes())
    raw[len(raw) // 2] ^= 4
    (folder / middle).write_bytes(raw)
    restart(master, RESTORE)
    assert master.metric("mooncake_snapshots_damaged_total") == 2
    assert master.metric("mooncake_snapshot_restores_total") == 1
    text = log.read_text()
    assert f"{newest}: it is cut short" in text
    assert f"{middle}: the checksum of block" in text
    assert f"began with snapshot {oldest}" in text
    aside = [name.replace(".snapshot", ".damaged") for name in (middle, newest)]
    assert names(folder) == [oldest, *aside]
    wait_until(lambda: store.get("k") == b"v", 5)


def test_a_disk_that_is_full(folder, make_master, make_store, tmp_path):
    """The master goes on and says it once; when there is room again, snapshots are written again."""
    log = tmp_path / "log"
    master = make_master(*LOCAL, log=log)
    store = make_store(MIB, at=master)
    first = take(master)
    unlimited = resource.prlimit(master.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(master.process.pid, resource.RLIMIT_FSIZE, (log.stat().st_size + 4096, unlimited[1]))
    for i in range(200):  # each leaves a tombstone of the size of its key
        assert store.remove(f"{i:04d}" * 60) == -704
    assert "File too large" in take(master)
    assert "File too large" in take(master)
    assert master.metric("mooncake_snapshots_failed_total") == 2
    assert store.put("k", b"v") == 0
    assert store.get("k") == b"v"
    assert names(folder) == [first]
    resource.prlimit(master.process.pid, resource.RLIMIT_FSIZE, unlimited)
    second = take(master)
    assert names(folder) == [first, second]
    assert log.read_text().count("a snapshot could not be written") == 1
    assert "snapshots are written again" in log.read_text()


@pytest.mark.slow
def test_a_master_killed_while_it_writes_begins_with_a_whole_snapshot(folder, make_master, make_store):
    """Whatever the moment: the newest is whole, or is not there at all."""
    master = make_master(*LOCAL, RESTORE, "--snapshot_interval_seconds=1")
    store = make_store(MIB, at=master)
    assert store.put("k", b"v") == 0
    wait_until(lambda: master.metric("mooncake_snapshots_written_total") >= 1, 10)
    for i in range(3):
        wait_until(lambda: children(master.process.pid), 10, "a child that writes")
        time.sleep(0.03 * i)
        restart(master)
        assert master.metric("mooncake_snapshots_damaged_total") == 0
        assert master.metric("mooncake_snapshot_restores_total") == 1
        wait_until(lambda: store.get("k") == b"v", 5)


def test_a_child_that_hangs_is_killed(folder, make_master):
    master = make_master(*LOCAL, "--snapshot_child_timeout_seconds=1")
    master.get("/health")
    said: list[str] = []
    asking = threading.Thread(target=lambda: said.append(take(master)))
    asking.start()
    (child,) = wait_until(lambda: children(master.process.pid), 10, "a child that writes")
    os.kill(child, signal.SIGSTOP)
    asking.join(10)
    assert said == ["it was not written within 1 s"]
    assert children(master.process.pid) == []
    assert take(master).endswith(".snapshot")
