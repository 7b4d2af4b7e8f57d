"""A server that was told to leave its disk lets go of it while it lives on, for the next one."""

from tests.processes import wait_until
from tests.ssd.conftest import pattern, settled

SIZES = {f"k{i}": 50_000 + i for i in range(40)}
QUICK = {"MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_TTL_MS": "200"}
FILL = """
from tests.ssd.conftest import pattern
result = [store.put(key, pattern(key, size)) for key, size in sizes.items()]
"""


def test_the_next_server_takes_the_directory_over(make_master, make_disk_worker, make_store, disk):
    master = make_master("--enable_offload", "--default_kv_lease_ttl=200")
    first = make_disk_worker(master, env=QUICK)
    assert first(FILL, sizes=SIZES) == [0] * len(SIZES)
    wait_until(lambda: settled(master))
    name = first("result = store.get_hostname()")
    reader = make_store(at=master)
    clear, keys = "result = store.batch_replica_clear(keys, name)", list(SIZES)
    wait_until(lambda: first(clear, keys=keys, name=name) == keys, what="values on disk only")
    assert reader.get("k3") == pattern("k3", SIZES["k3"])
    assert first("result = store.unmount_local_disk_segment(1)") == 0
    assert reader.get("k3") == b""
    assert reader.batch_is_exist(list(SIZES)) == [0] * len(SIZES)
    make_disk_worker(master)
    assert [path.name for path in disk.iterdir()] == ["tier-0"]
    wait_until(lambda: reader.batch_is_exist(list(SIZES)) == [1] * len(SIZES), what="the values")
    assert [reader.get(key) for key in SIZES] == [pattern(key, size) for key, size in SIZES.items()]
    assert first("result = store.put('in memory', b'v')") == 0
    assert first("result = store.get('in memory') == b'v'")
    assert first("result = store.unmount_local_disk_segment()") == 0
