"""The SSD tier when things go wrong: what was accepted is readable, or reported as evicted, and never other bytes."""

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mooncake.store import MooncakeDistributedStore
from tests.processes import children, wait_until
from tests.ssd.conftest import MIB, pattern, put_all, settled

CRASHES = 6

FILL = """
from tests.ssd.conftest import pattern
codes = [store.put(key, pattern(key, size)) for key, size in sizes.items()]
result = codes
"""


def check(store, sizes: dict[str, int]) -> list[str]:
    """The keys that are there; each has exactly its bytes."""
    if not sizes:
        return []
    there = []
    for key, value in zip(sizes, store.get_batch(list(sizes)), strict=True):
        if value:
            assert value == pattern(key, sizes[key]), key
            there.append(key)
    return there


def fill(worker, master, sizes: dict[str, int]) -> None:
    assert worker(FILL, sizes=sizes) == [0] * len(sizes)
    wait_until(lambda: settled(master))


def kill_with_server(worker, master) -> None:
    """Returns when the master has noticed."""
    before = master.metric("mooncake_disk_tiers")
    (server,) = children(worker.pid)
    os.kill(server, signal.SIGKILL)
    worker.kill()
    wait_until(lambda: master.metric("mooncake_disk_tiers") < before)


# ---------------------------------------------------------------- restarts


def test_values_survive_the_server(make_master, make_disk_worker, make_worker):
    """Killed, with its engine; another one finds them, and the master lists them again."""
    master = make_master("--enable_offload")
    sizes = {f"k{i}": 1 + i * 7919 % 200_000 for i in range(200)}
    worker = make_disk_worker(master)
    fill(worker, master, sizes)
    kill_with_server(worker, master)
    reader = make_worker(at=master)
    wait_until(lambda: reader("result = store.is_exist('k7')") == 0)
    other = make_disk_worker(master)
    wait_until(lambda: master.metric("master_key_count") == len(sizes))
    assert other(
        "from tests.ssd.conftest import pattern\n"
        "result = store.get_batch(list(sizes)) == [pattern(key, size) for key, size in sizes.items()]",
        sizes=sizes,
    )
    assert master.metric("mooncake_disk_torn") == 0


def test_values_survive_everything(make_master, make_disk_worker):
    """Master, server and engine all killed."""
    master = make_master("--enable_offload")
    sizes = {f"k{i}": 50_000 + i for i in range(100)}
    worker = make_disk_worker(master)
    fill(worker, master, sizes)
    kill_with_server(worker, master)
    master.kill()
    master.start()
    other = make_disk_worker(master)
    assert other(
        "from tests.ssd.conftest import pattern\n"
        "result = store.get_batch(list(sizes)) == [pattern(key, size) for key, size in sizes.items()]",
        sizes=sizes,
    )


def test_a_new_master_knows_what_is_on_disk(make_master, make_disk_store):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=100")
    store = make_disk_store(master, segment=16 * MIB)
    values = {f"k{i}": pattern(f"k{i}", MIB) for i in range(48)}
    put_all(store, values)
    wait_until(lambda: settled(master))
    assert store.remove("k3", force=True) == 0
    on_disk = master.metric("file_cache_nums_")
    master.kill()
    master.start()
    wait_until(lambda: master.metric("master_key_count") == 47, 10)
    wait_until(lambda: master.metric("file_cache_nums_") == on_disk, 10)
    del values["k3"]
    assert [store.get(key) for key in values] == list(values.values())  # one by one: leases are short
    assert store.get("k3") == b""
    assert store.put("new", b"n" * MIB) == 0
    put_all(store, {f"m{i}": pattern(f"m{i}", MIB) for i in range(16)})
    assert [store.get(key) for key in values] == list(values.values())  # one by one: leases are short


def test_removals_survive_the_server(make_master, make_disk_worker):
    """Also those that it was not told of: it is stopped while they are made, and then killed."""
    master = make_master("--enable_offload")
    sizes = {f"k{i}": 10_000 for i in range(20)}
    worker = make_disk_worker(master)
    fill(worker, master, sizes)
    (server,) = children(worker.pid)
    worker("for i in range(5): assert store.remove(f'k{i}', True) == 0")
    os.kill(server, signal.SIGSTOP)
    worker("for i in range(5, 10): assert store.remove(f'k{i}', True) == 0")
    kill_with_server(worker, master)
    other = make_disk_worker(master)
    exist = other("result = store.batch_is_exist(list(sizes))", sizes=sizes)
    assert exist == [0] * 10 + [1] * 10


def test_killed_in_the_middle_of_writing(make_master, make_disk_worker):
    """Again and again in one directory: no wrong byte, and what was known to be on disk is there again."""
    master = make_master("--enable_offload")
    rng = random.Random(7)
    sizes: dict[str, int] = {}
    known: set[str] = set()
    for life in range(CRASHES):
        worker = make_disk_worker(master)
        there = worker("from tests.ssd.test_faults import check\nresult = check(store, sizes)", sizes=sizes)
        assert known <= set(there)
        more = {f"life{life}-{i}": rng.choice([3000, 70_000, MIB + 13]) for i in range(24)}
        written = master.metric("mooncake_disk_writes")
        worker.send(FILL, sizes=more)
        wait_until(lambda before=written: master.metric("mooncake_disk_writes") > before, 10)
        time.sleep(rng.random() * 0.1)
        kill_with_server(worker, master)
        sizes |= more
        known = set(there)
    other = make_disk_worker(master)
    there = other("from tests.ssd.test_faults import check\nresult = check(store, sizes)", sizes=sizes)
    assert known <= set(there)
    assert len(there) > CRASHES


def test_another_quota_after_a_restart(make_master, make_disk_worker):
    master = make_master("--enable_offload")
    sizes = {f"k{i}": MIB for i in range(24)}
    worker = make_disk_worker(master)
    fill(worker, master, sizes)
    kill_with_server(worker, master)
    other = make_disk_worker(master, env={"MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(8 * MIB)})
    there = other("from tests.ssd.test_faults import check\nresult = check(store, sizes)", sizes=sizes)
    assert len(there) <= 8
    wait_until(lambda: master.metric("master_total_file_capacity_bytes") == 8 * MIB)
    assert master.metric("master_allocated_file_size_bytes") <= 8 * MIB
    fill(other, master, {f"m{i}": MIB for i in range(6)})


def test_several_servers_share_a_directory(make_master, make_disk_worker, disk):
    master = make_master("--enable_offload")
    first, second = make_disk_worker(master), make_disk_worker(master)
    config = "c = ReplicateConfig(); c.preferred_segment = store.get_hostname()\n"
    first(config + "result = store.put('a', b'a' * 9999, c)")
    second(config + "result = store.put('b', b'b' * 9999, c)")
    wait_until(lambda: settled(master))
    assert sorted(path.name for path in disk.iterdir()) == ["tier-0", "tier-1"]
    kill_with_server(first, master)
    kill_with_server(second, master)
    first, second = make_disk_worker(master), make_disk_worker(master)
    assert second("result = [len(store.get('a')), len(store.get('b'))]") == [9999, 9999]


# ---------------------------------------------------------------- damage


def test_damaged_values_are_never_served(make_master, make_disk_worker, disk):
    master = make_master("--enable_offload")
    sizes = {f"k{i}": 100_000 + i for i in range(40)}
    worker = make_disk_worker(master)
    fill(worker, master, sizes)
    kill_with_server(worker, master)
    rng = random.Random(3)
    flipped = 12
    for path in disk.glob("tier-0/*.data"):
        with open(path, "r+b") as f:
            for _ in range(flipped):
                f.seek(rng.randrange(path.stat().st_size))
                byte = f.read(1)
                f.seek(-1, 1)
                f.write(bytes([byte[0] ^ 0x10]))
    other = make_disk_worker(master)
    assert other("result = store.batch_is_exist(list(sizes))", sizes=sizes) == [1] * len(sizes)
    there = other("from tests.ssd.test_faults import check\nresult = check(store, sizes)", sizes=sizes)
    assert len(sizes) - flipped <= len(there) < len(sizes)
    lost = len(sizes) - len(there)
    wait_until(lambda: master.metric("mooncake_disk_corrupt") == lost)
    wait_until(lambda: master.metric("master_key_count") == len(there))
    assert master.metric("master_evicted_key_count") == lost
    gone = next(key for key in sizes if key not in there)
    assert other("result = store.put(key, b'again')", key=gone) == 0
    assert other("result = store.get(key) == b'again'", key=gone)


def test_damaged_indexes_cost_what_they_named(make_master, make_disk_worker, disk):
    master = make_master("--enable_offload")
    sizes = {f"k{i}": 5000 for i in range(60)}
    worker = make_disk_worker(master)
    fill(worker, master, sizes)
    kill_with_server(worker, master)
    (path,) = disk.glob("tier-0/*.index")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw[:-20])
    other = make_disk_worker(master)
    there = other("from tests.ssd.test_faults import check\nresult = check(store, sizes)", sizes=sizes)
    assert len(there) == len(sizes) - 2
    wait_until(lambda: master.metric("mooncake_disk_torn") == 2)


# ---------------------------------------------------------------- full and broken disks


@pytest.mark.parametrize("flags", [[], ["--offload_on_evict"]], ids=["eager", "on eviction"])
def test_a_quota_is_kept_by_evicting_the_oldest(make_master, make_disk_store, disk, flags):
    master = make_master("--enable_offload", f"--quota_bytes={24 * MIB}", "--default_kv_lease_ttl=100", *flags)
    store = make_disk_store(master, segment=16 * MIB)
    sizes = {f"k{i}": MIB for i in range(100)}
    put_all(store, {key: pattern(key, size) for key, size in sizes.items()})
    wait_until(lambda: settled(master))
    there = check(store, sizes)
    assert "k99" in there
    assert "k0" not in there
    assert len(there) >= 16
    used = sum(path.stat().st_size for path in disk.glob("tier-0/*.data"))
    assert used <= 24 * MIB
    wait_until(lambda: master.metric("master_key_count") == len(there))
    wait_until(lambda: master.metric("master_evicted_key_count") == len(sizes) - len(there))


def test_a_full_disk_without_eviction(make_master, make_disk_store):
    """What finds no room on it stays in memory until it is evicted from there, and is counted."""
    master = make_master(
        "--enable_offload", f"--quota_bytes={8 * MIB}", "--noenable_disk_eviction", "--default_kv_lease_ttl=100"
    )
    store = make_disk_store(master, segment=16 * MIB)
    sizes = {f"k{i}": MIB for i in range(60)}
    put_all(store, {key: pattern(key, size) for key, size in sizes.items()})
    wait_until(lambda: settled(master))
    there = check(store, sizes)
    assert "k59" in there
    assert "k0" in there
    assert master.metric("mooncake_offload_failed_total") > 0
    assert master.metric("master_evicted_key_count") == len(sizes) - len(there)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_file_system_that_is_full(make_master, make_disk_store, tmp_path, cleanup):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this container may not mount")
    cleanup.callback(subprocess.run, ["umount", "-l", str(small)], check=False)
    master = make_master("--enable_offload", f"--quota_bytes={1 << 40}", "--default_kv_lease_ttl=100")
    store = make_disk_store(master, segment=16 * MIB, path=small)
    sizes = {f"k{i}": MIB for i in range(100)}
    put_all(store, {key: pattern(key, size) for key, size in sizes.items()})
    wait_until(lambda: settled(master))
    there = check(store, sizes)
    assert "k99" in there
    assert master.metric("master_evicted_key_count") == len(sizes) - len(there)
    store.close()


def test_a_disk_that_refuses_every_write(make_master, make_disk_worker):
    """Its server goes on, values stay in memory, and evictions are counted."""
    master = make_master("--enable_offload", "--default_kv_lease_ttl=100")
    worker = make_disk_worker(master, segment=16 * MIB)
    (server,) = children(worker.pid)
    wait_until(lambda: master.metric("mooncake_disk_tiers") == 1)
    resource.prlimit(server, resource.RLIMIT_FSIZE, (4096, 4096))
    sizes = {f"k{i}": MIB for i in range(40)}
    assert worker(FILL, sizes=sizes).count(0) == len(sizes)
    wait_until(lambda: settled(master))
    there = worker("from tests.ssd.test_faults import check\nresult = check(store, sizes)", sizes=sizes)
    assert "k39" in there
    wait_until(lambda: master.metric("mooncake_offload_failed_total") >= 24)
    assert master.metric("master_evicted_key_count") == len(sizes) - len(there)


def test_too_many_wait_to_be_written(make_master, make_disk_store):
    """With a queue of one, memory waits for the disk: nothing is lost, puts are at most told to come again."""
    master = make_master(
        "--enable_offload", "--offload_on_evict", "--offloading_queue_limit=1", "--default_kv_lease_ttl=100"
    )
    store = make_disk_store(master, segment=16 * MIB)
    values = {f"k{i}": pattern(f"k{i}", MIB) for i in range(60)}
    put_all(store, values)
    assert [store.get(key) for key in values] == list(values.values())  # one by one: leases are short
    assert master.metric("master_evicted_key_count") == 0


def test_too_many_wait_and_may_be_lost(make_master, make_disk_store):
    master = make_master(
        "--enable_offload", "--offload_on_evict", "--offload_force_evict", "--offloading_queue_limit=1",
        "--default_kv_lease_ttl=100",
    )  # fmt: skip
    store = make_disk_store(master, segment=16 * MIB)
    sizes = {f"k{i}": MIB for i in range(80)}
    for at in range(0, 80, 8):
        keys = [f"k{i}" for i in range(at, at + 8)]
        wait_until(lambda some=keys: store.put_batch(some, [pattern(key, MIB) for key in some]) == 0)
    there = check(store, sizes)
    lost = len(sizes) - len(there)
    assert master.metric("master_evicted_key_count") == lost
    assert master.metric("mooncake_offload_forced_total") == lost


def test_a_value_larger_than_staging_stays_in_memory(make_master, make_disk_store, monkeypatch):
    monkeypatch.setenv("MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES", str(16 * MIB))
    master = make_master("--enable_offload", "--default_kv_lease_ttl=100")
    store = make_disk_store(master, segment=40 * MIB)
    large = pattern("large", 17 * MIB)
    assert store.put("large", large) == 0
    wait_until(lambda: master.metric("mooncake_offload_failed_total") == 1)
    assert store.get("large") == large
    time.sleep(0.3)  # its lease ends, and it is the oldest from then on
    put_all(store, {f"k{i}": pattern(f"k{i}", MIB) for i in range(60)})
    assert store.get("large") == b""
    assert master.metric("master_evicted_key_count") == 1


# ---------------------------------------------------------------- races


def test_removals_while_values_are_written_and_read(make_master, make_disk_store):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=100")
    store = make_disk_store(master, segment=16 * MIB)
    sizes = {f"k{i}": 100_000 + i for i in range(200)}
    stop = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        rng = random.Random(1)
        while not stop.is_set():
            keys = rng.sample(list(sizes), 20)
            for key, value in zip(keys, store.get_batch(keys), strict=True):
                if value not in (b"", pattern(key, sizes[key])):
                    wrong.append(key)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    rng = random.Random(2)
    end = time.monotonic() + 4
    while time.monotonic() < end:
        key = rng.choice(list(sizes))
        store.put(key, pattern(key, sizes[key]))
        store.remove(rng.choice(list(sizes)), force=True)
    stop.set()
    for thread in readers:
        thread.join(30)
    assert wrong == []
    wait_until(lambda: store.remove_all(force=True) == 0, what="the last put's end")
    wait_until(lambda: master.metric("master_allocated_bytes") == 0, 12)
    wait_until(lambda: master.metric("file_cache_nums_") == 0)
    wait_until(lambda: master.metric("mooncake_offload_queue") == 0)
    assert master.metric("mooncake_disk_corrupt") == 0


def test_reading_while_the_disk_evicts(make_master, make_disk_store, make_worker):
    master = make_master("--enable_offload", f"--quota_bytes={16 * MIB}", "--default_kv_lease_ttl=100")
    store = make_disk_store(master, segment=8 * MIB)
    sizes = {f"k{i}": 300_000 for i in range(400)}
    reader = make_worker(at=master)
    reader.send(
        "from tests.ssd.test_faults import check\nimport time\nend = time.monotonic() + 5; seen = 0\n"
        "while time.monotonic() < end: seen += len(check(store, sizes))\nresult = seen",
        sizes=sizes,
    )
    put_all(store, {key: pattern(key, size) for key, size in sizes.items()})
    assert reader.receive() > 0
    assert "k399" in check(store, sizes)


def test_the_server_is_killed_while_it_is_read_from(make_master, make_disk_worker, make_worker):
    """Readers get misses and errors within their time, and the bytes again when it is back."""
    master = make_master("--enable_offload", "--default_kv_lease_ttl=500")
    sizes = {f"k{i}": 500_000 for i in range(100)}
    owner = make_disk_worker(master, segment=16 * MIB)
    wait_until(lambda: not [code for code in owner(FILL, sizes=sizes) if code])
    wait_until(lambda: settled(master))
    reader = make_worker(at=master, buffer=64 * MIB)
    reader.send(
        "from tests.ssd.test_faults import check\nimport time\nend = time.monotonic() + 3; longest = 0\n"
        "while time.monotonic() < end:\n"
        "    begun = time.monotonic(); check(store, sizes); longest = max(longest, time.monotonic() - begun)\n"
        "result = longest",
        sizes=sizes,
    )
    time.sleep(1)
    kill_with_server(owner, master)
    assert reader.receive() < 15
    owner = make_disk_worker(master, segment=16 * MIB)
    there = reader("result = check(store, sizes)")
    assert len(there) >= 84  # those that were only in memory are lost


# ---------------------------------------------------------------- set-up


@pytest.mark.parametrize("kind", ["missing", "relative", "link", "file"])
def test_directories_that_cannot_be_used(master, disk, tmp_path, kind):
    path = {"missing": tmp_path / "nowhere", "relative": "ssd", "link": tmp_path / "link", "file": tmp_path / "f"}[kind]
    (tmp_path / "link").symlink_to(disk)
    (tmp_path / "f").write_text("")
    store = MooncakeDistributedStore()
    with pytest.raises(ValueError, match="SSD directory"):
        store.setup("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address, None, True, str(path))
    assert store.health_check() == 1


def test_a_directory_that_may_not_be_written_to(master, disk):
    """(Root may write anywhere, so another user tries.)"""
    disk.chmod(0o555)
    code = (
        "import os\n"
        "from mooncake.offload import OffloadPathError, offload_settings\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        f"try: offload_settings({str(disk)!r}, 1 << 20)\n"
        "except OffloadPathError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot be used" in run.stdout or "cannot be written to" in run.stdout


def test_a_master_without_the_tier(master, make_disk_worker, tmp_path):
    """The server says so, and serves memory as ever."""
    worker = make_disk_worker(master, segment=4 * MIB, wait=False)
    assert worker("result = store.put('k', b'v' * 1000)") == 0
    assert worker("result = len(store.get('k'))") == 1000
    assert master.metric("mooncake_disk_tiers") == 0


def test_a_damaged_tier_file_is_named(make_master, make_disk_worker, disk, capfd):
    master = make_master("--enable_offload")
    (disk / "tier-0").mkdir()
    (disk / "tier-0" / "tier.json").write_text("{")
    worker = make_disk_worker(master, wait=False)
    assert worker("result = store.put('k', b'v')") == 0
    text = ""

    def told() -> bool:
        nonlocal text
        text += capfd.readouterr().err
        return "tier.json is damaged" in text

    wait_until(told)


def test_idle_servers_complain_of_nothing(make_master, make_disk_worker, tmp_path, capfd):
    log = tmp_path / "master.log"
    master = make_master("--enable_offload", log=log)
    make_disk_worker(master)
    time.sleep(3)
    assert master.metric("master_total_file_capacity_bytes") > 0
    lines = Path(log).read_text().splitlines() + capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("E")] == []
