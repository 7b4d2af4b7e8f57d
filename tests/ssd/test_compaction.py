"""Room comes back from files that are mostly dead, while all goes on, and whatever is killed meanwhile."""

import random
import time

from tests.processes import wait_until
from tests.ssd.conftest import MIB, settled
from tests.ssd.test_faults import fill, kill_with_server

FILE = {"MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(4 * MIB)}
CRASHES = 3


def on_disk(disk) -> int:
    return sum(path.stat().st_size for path in disk.glob("tier-*/*.data"))


def remove_most(worker, sizes: dict[str, int], keep: int) -> dict[str, int]:
    gone = [key for i, key in enumerate(sizes) if i % keep]
    assert worker("result = [store.remove(key, force=True) for key in gone]", gone=gone) == [0] * len(gone)
    return {key: size for i, (key, size) in enumerate(sizes.items()) if not i % keep}


def there(worker, sizes: dict[str, int]) -> set[str]:
    return set(worker("from tests.ssd.test_faults import check\nresult = check(store, sizes)", sizes=sizes))


def test_room_comes_back_though_every_file_has_something_alive(make_master, make_disk_worker, disk):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=100")
    worker = make_disk_worker(master, segment=16 * MIB, env=FILE)
    sizes = {f"k{i}": 200_000 + i for i in range(160)}  # 32 MiB in eight files
    fill(worker, master, sizes)
    assert on_disk(disk) >= 30 * MIB
    left = remove_most(worker, sizes, 8)
    wait_until(lambda: on_disk(disk) <= 2 * sum(left.values()) + 8 * MIB, 15, "the room")
    wait_until(lambda: master.metric("mooncake_disk_compacted") > 0)
    assert there(worker, left) == set(left)
    assert there(worker, sizes) == set(left)
    assert master.metric("mooncake_disk_compacted_bytes") >= 200_000
    kill_with_server(worker, master)
    other = make_disk_worker(master, segment=16 * MIB, env=FILE)
    assert there(other, sizes) == set(left)
    assert master.metric("mooncake_disk_torn") == master.metric("mooncake_disk_corrupt") == 0


def test_without_compaction_files_stay(make_master, make_disk_worker, disk):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=100")
    worker = make_disk_worker(master, segment=16 * MIB, env=FILE | {"MOONCAKE_OFFLOAD_COMPACTION_BYTES_PER_S": "0"})
    sizes = {f"k{i}": 200_000 + i for i in range(57)}  # the last one stays: a file with nothing alive would go
    fill(worker, master, sizes)
    before = on_disk(disk)
    left = remove_most(worker, sizes, 8)
    time.sleep(2.5)
    assert on_disk(disk) == before
    assert there(worker, left) == set(left)


def test_killed_in_the_middle_of_compaction(make_master, make_disk_worker, disk):
    """At any time: no value is lost, none that was removed comes back, no byte is wrong."""
    master = make_master("--enable_offload", "--default_kv_lease_ttl=100", "--client_ttl=2")
    rng = random.Random(7)
    env = FILE | {"MOONCAKE_OFFLOAD_COMPACTION_BYTES_PER_S": str(2 * MIB)}  # a file takes a second
    alive: dict[str, int] = {}
    removed: dict[str, int] = {}
    compacted = 0
    worker = make_disk_worker(master, segment=16 * MIB, env=env)
    for turn in range(CRASHES):
        sizes = {f"{turn}/{i}": 100_000 + rng.randrange(200_000) for i in range(60)}
        fill(worker, master, sizes)
        alive |= sizes
        left = remove_most(worker, alive, 3)
        removed |= {key: size for key, size in alive.items() if key not in left}
        alive = left
        files = len(list(disk.glob("tier-0/*.data")))
        time.sleep(1 + 2 * rng.random())
        compacted += master.metric("mooncake_disk_compacted") > 0 or len(list(disk.glob("tier-0/*.data"))) != files
        kill_with_server(worker, master)
        worker = make_disk_worker(master, segment=16 * MIB, env=env)
        wait_until(lambda want=alive: master.metric("master_key_count") == len(want), 15, "all values, and no more")
        assert there(worker, alive) == set(alive)
        assert there(worker, removed) == set()
    assert compacted
    assert master.metric("mooncake_disk_torn") == master.metric("mooncake_disk_corrupt") == 0
    assert settled(master)
