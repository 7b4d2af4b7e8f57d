"""Tenants of a real master: names that are private, quotas that hold, and what an operator may do about both."""

import ctypes
import signal
import statistics
import threading
import time

import pytest
import yaml

from mooncake.client.prefixes import PrefixClient
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from tests.engine.services import start_service
from tests.processes import BIN, free_port, wait_until

MIB = 1 << 20
KIB = 1 << 10


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "quotas.yaml"
    path.write_text(
        "version: 1\ntenants:\n- {name: a, quota: 16MB}\n- {name: b, quota: 8MB}\n- {name: default, quota: 4MB}\n"
    )
    return path


@pytest.fixture
def tenants(make_master, policy):
    """A master with the tenants a, b and default."""
    master = make_master("--enable_multi_tenants", f"--tenant_quota_connector_uri={policy}")
    master.get("/health")
    return master


@pytest.fixture
def join(tenants, cleanup):
    """A store of a tenant."""

    def join(tenant: str, segment: int = 0, master=tenants) -> MooncakeDistributedStore:
        store = MooncakeDistributedStore()
        arguments = ("127.0.0.1", "P2PHANDSHAKE", segment, 16 * MIB, "tcp", "", master.address)
        assert store.setup(*arguments, tenant_id=tenant) == 0
        cleanup.callback(store.close)
        return store

    return join


@pytest.fixture
def pool(join):
    """The 64 MiB that all share, of a store that nobody else asks."""
    return join("default", 64 * MIB)


def test_no_call_crosses_tenants(tenants, pool, join):
    a, b = join("a"), join("b")
    assert a.put("k", b"of a") == 0
    assert b.is_exist("k") == 0
    assert b.get("k") == b""
    assert b.get_size("k") == -704
    assert b.get_replica_desc("k") == []
    assert b.batch_is_exist(["k"]) == [0]
    assert b.batch_get_replica_desc(["k"]) == {}
    assert b.remove("k", force=True) == -704
    assert b.batch_remove(["k"], force=True) == [-704]
    assert b.remove_by_regex(".", force=True) == 0
    assert b.remove_all(force=True) == 0
    assert b.batch_replica_clear(["k"]) == []
    assert b.batch_get_session_start(["k"]) == [-704]
    segment = pool.get_hostname()
    assert b.create_copy_task("k", [segment])[1] == -704
    assert b.upsert("k", b"of b") == 0
    assert (a.get("k"), b.get("k")) == (b"of a", b"of b")
    assert b.put("k", b"again") == 0  # b's own is there
    assert b.batch_put_session_start(["k"], [4], ReplicateConfig()) == [-705]
    assert b.get("k") == b"of b"
    task, code = a.create_copy_task("k", [segment])
    assert code == 0
    assert b.query_task(task) == (None, -1400)
    assert a.query_task(task)[1] == 0
    assert b.remove_by_regex("^k$", force=True) == 1
    assert a.get("k") == b"of a"
    assert a.remove_all(force=True) == 1
    for store, name in ((a, "a"), (b, "b")):
        assert store.put("r", name.encode()) == 0
    for name, count in (("a", 2), ("b", 0)):
        prefixes = PrefixClient(tenants.address, 1.0, name)
        a.put("r2", b"x")
        assert prefixes.lengths(["r"], [["", "2"]]) == [count or 1]
        prefixes.close()


def test_groups_sessions_and_upserts_are_private_too(pool, join):
    a, b = join("a"), join("b")
    config = ReplicateConfig()
    config.group_ids = ["g"]
    for store, value in ((a, b"a" * 100), (b, b"b" * 100)):
        assert store.put("k", value, config) == 0
    assert b.remove("k", force=True) == 0
    assert a.get("k") == b"a" * 100
    other = ReplicateConfig()
    other.group_ids = ["h"]
    assert a.upsert("k", b"new", other) == -600  # its group is g
    assert a.upsert("k", b"new", config) == 0
    assert a.upsert("k", b"newer") == 0  # and stays
    assert a.upsert("k", b"newest", config) == 0
    assert a.get("k") == b"newest"
    source = ctypes.create_string_buffer(b"0123456789", 10)
    address = ctypes.addressof(source)
    assert b.batch_put_session_start(["s"], [10], config) == [0]
    assert b.batch_put_from_multi_buffer_ranges(["s"], [[address]], [[10]], [[0]]) == [10]
    assert b.batch_put_session_end(["s"]) == [0]
    assert b.get("s") == b"0123456789"
    assert a.get("s") == b""


def test_names_of_tenants(tenants, pool, join, cleanup, make_master):
    store = MooncakeDistributedStore()
    cleanup.callback(store.close)
    for bad in ("", "_a", "a\nb"):
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", tenants.address, tenant_id=bad) == -1
    stranger = join("stranger")
    assert stranger.put("k", b"v") == -1701
    assert stranger.get("k") == b""
    assert stranger.is_exist("k") == 0
    off = make_master()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", off.address, tenant_id="_a") == 0
    other = join("b", master=off)
    assert store.put("k", b"v") == 0
    assert other.get("k") == b"v"


def test_a_quota_holds_and_its_own_values_make_room(tenants, pool, join):
    b, value = join("b"), bytes(MIB)
    a = join("a")
    assert a.put("kept", bytes(2 * MIB)) == 0
    for i in range(40):  # five times what it may have
        assert b.put(f"k{i}", value) == 0, i
    status, answer = tenants.ask("GET", "/api/v1/tenant_quotas?tenant_id=b")
    assert (status, answer["success"]) == (200, True)
    assert answer["data"]["requested_quota_bytes"] == answer["data"]["effective_quota_bytes"] == 8 * MIB
    assert answer["data"]["used_bytes"] == answer["data"]["committed_count"] * MIB <= 8 * MIB
    assert b.get("k39") == value
    assert a.get("kept") == bytes(2 * MIB)
    assert b.put("too large", bytes(9 * MIB)) == -1700
    assert b.remove_all(force=True) > 0
    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    assert b.put_batch([f"p{i}" for i in range(8)], [value] * 8, pinned) == 0
    started = time.monotonic()
    assert b.put("one more", b"v") == -1700  # at once: nothing of its own may go
    assert time.monotonic() - started < 0.5
    assert b.upsert("p0", bytes(MIB)) == 0
    assert [b.get(f"p{i}") for i in range(8)] == [value] * 8
    text = tenants.get("/metrics")
    assert f'mooncake_tenant_used_bytes{{tenant="b"}} {8 * MIB}' in text
    assert f'mooncake_tenant_quota_bytes{{tenant="a"}} {16 * MIB}' in text


@pytest.mark.slow
def test_a_flood_neither_evicts_nor_slows_another(tenants, pool, join):
    a, b = join("a"), join("b")
    block = bytes(64 * KIB)
    mine = {f"m{i}": bytes([i]) * 64 * KIB for i in range(100)}
    for key, data in mine.items():
        assert a.put(key, data) == 0

    def times() -> float:
        taken = []
        for i in range(200):
            started = time.monotonic()
            assert a.put(f"t{i}", block) == 0
            taken.append(time.monotonic() - started)
            assert a.remove(f"t{i}", force=True) == 0
        return statistics.median(taken)

    alone = times()
    stop, codes = threading.Event(), set()

    def flood() -> None:
        i = 0
        while not stop.is_set():
            i += 1
            codes.add(b.put(f"f{i}", block))

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        beside = times()
    finally:
        stop.set()
        thread.join()
    assert codes == {0}
    assert beside < 10 * alone + 0.01, (alone, beside)  # one processor is shared; no put waited for room (0.7 s)
    assert all(a.get(key) == data for key, data in mine.items())


def test_a_new_master_knows_whose_values_they_are(tenants, pool, join):
    a, b = join("a"), join("b")
    assert a.put("k", b"of a") == 0
    assert b.put("k", b"of b") == 0
    config = ReplicateConfig()
    config.group_ids = ["g"]
    assert b.put("in a group", b"too", config) == 0
    tenants.kill()
    tenants.start()
    wait_until(lambda: a.get("k") == b"of a", what="the value of a")
    wait_until(lambda: b.get("k") == b"of b", what="the value of b")
    assert b.get("in a group") == b"too"
    assert a.is_exist("in a group") == 0
    status, answer = tenants.ask("GET", "/api/v1/tenant_quotas")
    assert status == 200
    assert {each["tenant_id"]: each["committed_count"] for each in answer["data"]} == {"a": 1, "b": 2, "default": 0}


@pytest.mark.slow
def test_a_drained_segment_and_a_new_master(tenants, pool, join):
    """What was moved is still its tenant's."""
    a, b, other = join("a"), join("b"), join("default", 64 * MIB)
    config = ReplicateConfig()
    config.preferred_segment = pool.get_hostname()
    config.group_ids = ["g"]
    for store, value in ((a, b"a" * MIB), (b, b"b" * MIB)):
        assert store.put("k", value, config) == 0
    name = pool.get_hostname()
    job = tenants.ask("POST", "/api/v1/drain_jobs", {"segments": [name]})[1]["job_id"]
    query = f"/api/v1/drain_jobs/query?job_id={job}"
    wait_until(lambda: tenants.ask("GET", query)[1]["status_name"] == "SUCCEEDED", 20, "the job")
    tenants.kill()
    tenants.start()
    pool.close()
    wait_until(lambda: a.get("k") == b"a" * MIB, what="the value of a")
    wait_until(lambda: b.get("k") == b"b" * MIB, what="the value of b")
    assert b.remove_all(force=True) == 1
    assert a.get("k") == b"a" * MIB
    assert other.is_exist("k") == 0


def test_what_was_nobodys_is_the_default_tenants(tenants, pool, join, policy):
    a = join("a")
    assert a.put("k", b"v") == 0
    flags, tenants._flags = tenants._flags, ()
    tenants.kill()
    tenants.start()
    wait_until(lambda: pool.put("one name space", b"v") == 0, what="the pool")
    wait_until(lambda: a.get("one name space") == b"v", what="the value")
    assert a.get("k") == b""
    assert tenants.get("/get_all_keys").split() == ["one", "name", "space"]
    config = ReplicateConfig()
    config.group_ids = ["g"]
    assert pool.put("in a group", b"v", config) == 0
    tenants._flags = flags
    tenants.kill()
    tenants.start()
    wait_until(lambda: pool.put("k", b"d") == 0, what="the pool")
    assert a.get("k") == b""
    assert pool.get("one name space") == pool.get("in a group") == b"v"
    assert a.is_exist("one name space") == 0
    answer = tenants.ask("GET", "/api/v1/tenant_quotas?tenant_id=default")[1]["data"]
    assert (answer["committed_count"], answer["used_bytes"]) == (3, 3 * 256)
    assert pool.remove("in a group", force=True) == 0
    tenants.kill()
    tenants.start()
    wait_until(lambda: pool.get("one name space") == b"v", what="the value")
    assert pool.is_exist("in a group") == 0


def test_routes_about_quotas(tenants, pool, join, policy):
    route = "/api/v1/tenant_quotas"
    assert tenants.ask("GET", f"{route}?tenant_id=none") == (
        404,
        {"success": False, "error_code": -704, "error_message": "OBJECT_NOT_FOUND"},
    )
    status, answer = tenants.ask("PUT", f"{route}?tenant_id=new", {"requested_quota_bytes": MIB})
    assert (status, answer["data"]["requested_quota_bytes"], answer["data"]["used_bytes"]) == (200, MIB, 0)
    assert yaml.safe_load(policy.read_text())["tenants"][-1] == {"name": "new", "quota": MIB}
    new = join("new")
    assert new.put("k", b"v") == 0
    assert tenants.ask("DELETE", f"{route}?tenant_id=new") == (
        409,
        {"success": False, "error_code": -1702, "error_message": "TENANT_NOT_EMPTY"},
    )
    assert tenants.ask("POST", "/api/v1/remove_all?force=true&tenant_id=a") == (
        200,
        {"success": True, "removed_count": 0},
    )
    assert tenants.ask("POST", "/api/v1/remove_all?force=true&tenant_id=new") == (
        200,
        {"success": True, "removed_count": 1},
    )
    assert tenants.ask("DELETE", f"{route}?tenant_id=new")[0] == 200
    assert tenants.ask("DELETE", f"{route}?tenant_id=new") == (200, {"success": True, "data": None})
    assert [each["name"] for each in yaml.safe_load(policy.read_text())["tenants"]] == ["a", "b", "default"]
    assert new.put("k", b"v") == -1701
    for name, body in (("a", {"requested_quota_bytes": 0}), ("_a", {"requested_quota_bytes": 1}), ("a", {}), ("", {})):
        status, answer = tenants.ask("PUT", f"{route}?tenant_id={name}", body)
        assert (status, answer["error_code"]) == (400, -600), (name, body)
    a = join("a")
    for i in range(12):
        assert a.put(f"k{i}", bytes(MIB)) == 0
    tenants.ask("PUT", f"{route}?tenant_id=a", {"requested_quota_bytes": 4 * MIB})
    wait_until(
        lambda: tenants.ask("GET", f"{route}?tenant_id=a")[1]["data"]["over_quota"] is False, 20, "the smaller quota"
    )


def test_admin_routes_look_at_one_tenant(tenants, pool, join):
    a, default = join("a"), join("default")
    assert a.put("of a", b"v") == 0
    assert default.put("d", b"v") == 0
    assert tenants.get("/get_all_keys").split("\n")[:-1] == ["d"]
    assert tenants.get("/get_all_keys?tenant_id=a").split("\n")[:-1] == ["of a"]
    assert tenants.ask("GET", "/query_key?key=of%20a")[0] == 404
    assert tenants.ask("GET", "/query_key?key=d&tenant_id=_a")[0] == 400
    assert tenants.ask("POST", "/api/v1/remove_all?tenant_id=")[1]["error_code"] == -600
    assert tenants.ask("GET", "/query_key?key=of%20a&tenant_id=a")[1]["data"][0]["size_"] == 1
    assert tenants.ask("GET", "/batch_query_keys?keys=d&tenant_id=a")[1]["data"]["d"]["ok"] is False


@pytest.mark.slow
def test_quotas_that_exceed_the_pool_are_cut(tenants, pool, join):
    tenants.ask("PUT", "/api/v1/tenant_quotas?tenant_id=a", {"requested_quota_bytes": 116 * MIB})  # 128 with the others
    answer = tenants.ask("GET", "/api/v1/tenant_quotas")[1]["data"]
    assert {each["tenant_id"]: each["effective_quota_bytes"] for each in answer} == {
        "a": 58 * MIB,
        "b": 4 * MIB,
        "default": 2 * MIB,
    }


@pytest.mark.slow
def test_values_on_disk(make_master, policy, cleanup, tmp_path, join):
    master = make_master("--enable_multi_tenants", f"--tenant_quota_connector_uri={policy}", "--enable_offload")
    disk = tmp_path / "ssd"
    disk.mkdir()
    pool = MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 64 * MIB, 16 * MIB, "tcp", "", master.address)
    assert pool.setup(*arguments, None, True, str(disk)) == 0
    cleanup.callback(pool.close)
    wait_until(lambda: master.metric("mooncake_disk_tiers") == 1, what="the tier")
    a, b = join("a", master=master), join("b", master=master)
    values = {f"k{i}": bytes([i]) * MIB for i in range(24)}
    assert a.put("k0", b"of a") == 0
    for key, value in values.items():
        wait_until(lambda k=key, v=value: b.put(k, v) == 0, 20, f"a put of {key}")
    wait_until(lambda: master.metric("mooncake_offload_queue") == 0, what="the writes")
    assert all(b.get(key) == value for key, value in values.items())  # 24 MB, of which 8 MB are in memory
    assert master.ask("GET", "/api/v1/tenant_quotas?tenant_id=b")[1]["data"]["used_bytes"] <= 8 * MIB
    master.kill()
    master.start()
    wait_until(lambda: b.get("k0") == values["k0"] and b.get("k23") == values["k23"], 20, "the values of b")
    wait_until(lambda: a.get("k0") == b"of a", 20, "the value of a")
    assert a.is_exist("k1") == 0
    assert b.remove_all(force=True) == 24
    assert a.get("k0") == b"of a"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tenants: []", "expected a mapping with version: 1"),
        ("version: 1\ntenants: {a: 1}", "expected a list"),
        ("version: 1\ntenants: [{name: a}]", "expected name and quota"),
        ("version: 1\ntenants: [{name: _a, quota: 1}]", "wrong in name"),
        ("version: 1\ntenants: [{name: a, quota: 1}, {name: a, quota: 1}]", "it is there twice"),
        ("version: 1\ntenants: [{name: a, quota: much}]", "wrong in the quota of a"),
        ("version: 1\ntenants: [{name: a, quota: 0}]", "wrong in the quota of a"),
    ],
)
def test_a_wrong_policy(tmp_path, text, sentence):
    from mooncake.errors import ConfigError
    from mooncake.master.tenants.policy import FilePolicy

    path = tmp_path / "q.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        FilePolicy(str(path)).load()


def test_a_master_without_its_policy_does_not_start(tmp_path):
    import subprocess

    argv = [
        BIN / "mooncake_master", f"--rpc_port={free_port()}", f"--metrics_port={free_port()}",
        "--enable_multi_tenants", f"--tenant_quota_connector_uri={tmp_path}/none.yaml",
    ]  # fmt: skip
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 1
    assert f"{tmp_path}/none.yaml cannot be read" in ended.stderr


@pytest.mark.slow
def test_quotas_in_etcd(make_master, cleanup, tmp_path):
    service = start_service("etcd", tmp_path)
    cleanup.callback(service.close)
    flags = (
        "--enable_multi_tenants", "--tenant_quota_connector_type=etcd", "--cluster_id=c1",
        f"--tenant_quota_connector_uri=etcd://127.0.0.1:{service.port}",
    )  # fmt: skip
    master = make_master(*flags)
    assert master.ask("PUT", "/api/v1/tenant_quotas?tenant_id=a", {"requested_quota_bytes": MIB})[0] == 200
    master.kill()
    master.start()
    status, answer = master.ask("GET", "/api/v1/tenant_quotas")
    assert (status, [each["requested_quota_bytes"] for each in answer["data"]]) == (200, [MIB])
    assert (
        service.backend().get("mooncake-store/c1/tenant_quota_policy")
        == b"version: 1\ntenants:\n- name: a\n  quota: 1048576\n"
    )


# ---------------------------------------------------------------- quotas read again


def hang_up(master) -> None:
    master.process.send_signal(signal.SIGHUP)


def test_quotas_are_read_again_on_sighup(tenants, policy, pool, join):
    a, b = join("a"), join("b")
    assert a.put("k", b"of a") == b.put("k", b"of b") == 0
    assert join("c").put("k", b"of c") == -1701
    policy.write_text("version: 1\ntenants:\n- {name: a, quota: 2MB}\n- {name: c, quota: 8MB}\n")
    hang_up(tenants)
    c = join("c")
    wait_until(lambda: c.put("k", b"of c") == 0, what="the new tenant")
    assert (a.get("k"), b.get("k"), c.get("k")) == (b"of a", b"of b", b"of c")
    assert b.put("more", b"of nobody") == -1701
    assert a.put("large", bytes(3 * MIB)) in (-600, -1700)
    quotas = {one["tenant_id"]: one for one in tenants.ask("GET", "/api/v1/tenant_quotas")[1]["data"]}
    assert {name: one["requested_quota_bytes"] for name, one in quotas.items()} == {"a": 2 * MIB, "b": 0, "c": 8 * MIB}
    assert b.remove("k", force=True) == 0
    assert tenants.ask("GET", "/api/v1/tenant_quotas?tenant_id=b")[0] == 404


@pytest.mark.parametrize("content", ["version: 2\n", "{", "version: 1\ntenants:\n- {name: a, quota: -1}\n", None])
def test_quotas_that_are_wrong_change_nothing(tenants, policy, pool, join, content):
    before = tenants.ask("GET", "/api/v1/tenant_quotas")
    if content is None:
        policy.unlink()
    else:
        policy.write_text(content)
    hang_up(tenants)
    time.sleep(0.5)
    assert tenants.ask("GET", "/api/v1/tenant_quotas") == before
    assert join("a").put("k", b"of a") == 0
