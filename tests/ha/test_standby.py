"""What a standby answers, and how masters are told whom to ask."""

import subprocess
import sys
import time

import pytest

from mooncake.errors import ConfigError
from mooncake.master.flags import parse_command_line, read_settings
from mooncake.master.ha_settings import election_text, published_address
from mooncake.store import MooncakeDistributedStore
from tests.ha.pool import health
from tests.processes import BIN, free_port, wait_until

MIB = 1 << 20


def test_a_standby(make_backend, make_pool):
    pool = make_pool(make_backend("redis"))
    leader, standby = pool.leader(), pool.standby()
    wait_until(lambda: health(standby)["leader_address"], what="the standby's knowledge of the leader")
    told = {"leader_address": leader.address, "view_version": health(leader)["view_version"]}
    states = {leader: ("leader", "serving", True), standby: ("standby", "standby", False)}
    for master, (role, state, ready) in states.items():
        assert health(master) == {"status": "ok", "role": role, "ha_state": state, "service_ready": ready, **told}
        assert (master.get("/role"), master.get("/ha_status")) == (role, state)
        assert master.ask("GET", "/leader") == (200, {"present": True, **told})
        assert master.get("/metrics/summary").startswith(
            f"role={role}, state={state}, service_ready={str(ready).lower()}"
        )
    assert standby.metric("ha_standby_state") == 1
    for method, path in (("GET", "/get_all_keys"), ("POST", "/api/v1/remove_all"), ("GET", "/nothing")):
        status, answer = standby.ask(method, path)
        assert (status, answer["success"], answer["error_code"]) == (503, False, -1010)


def test_a_store_that_asks_a_standby(make_backend, make_pool, caplog):
    pool = make_pool(make_backend("redis"))
    store = MooncakeDistributedStore()
    started = time.monotonic()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, MIB, "tcp", "", pool.standby().address) == -1
    assert time.monotonic() - started < 2
    assert "this master is a standby" in caplog.text


@pytest.mark.slow
def test_a_store_that_begins_while_nobody_leads(make_backend, make_pool, cleanup):
    """It waits for the election."""
    backend = make_backend("redis")
    pool = make_pool(backend, 1)
    pool.masters[0].kill()
    pool.add_master()
    store = MooncakeDistributedStore()
    cleanup.callback(store.close)
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, MIB, "tcp", "", backend.address) == 0
    assert store.put("k", b"v") == 0


@pytest.mark.slow
def test_a_store_without_any_leader(make_backend, caplog):
    started = time.monotonic()
    store = MooncakeDistributedStore()
    address = make_backend("redis").address
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", address) == -1
    assert time.monotonic() - started < 13
    assert "nobody leads now; is a mooncake_master with --enable_ha running" in caplog.text
    assert "secret" not in caplog.text


def text_of(*flags: str) -> str:
    return election_text(read_settings(parse_command_line(["--enable_ha", *flags])).values)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--etcd_endpoints=http://h:1;http://i:2"], "etcd://http://h:1;http://i:2"),
        (["--ha_backend_connstring=h:1,i:2"], "etcd://h:1,i:2"),
        (["--ha_backend_connstring=etcd://h:1"], "etcd://h:1"),
        (["--ha_backend_type=redis", "--ha_backend_connstring=h:1"], "redis://h:1"),
        (["--ha_backend_type=redis", "--ha_backend_connstring=rediss://:p@h:1/2"], "rediss://:p@h:1/2"),
        (["--ha_backend_type=k8s", "--ha_backend_connstring=kv/pool"], "k8s://kv/pool"),
        (["--ha_backend_type=k8s", "--pod_namespace=kv"], "k8s://kv/mooncake-cluster"),
        (["--ha_backend_type=k8s", "--pod_namespace=kv", "--cluster_id=A.b"], "k8s://kv/a-b"),
        (["--ha_backend_type=k8s", "--ha_backend_connstring=k8s://pool"], "k8s:///pool"),
    ],
)
def test_what_the_flags_mean(flags, text):
    assert text_of(*flags) == text


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ([], "--enable_ha needs the address of etcd: give --ha_backend_connstring="),
        (["--ha_backend_type=redis"], "needs the address of redis"),
        (["--ha_backend_type=redis", "--etcd_endpoints=h:1"], "contradicts --ha_backend_type=redis"),
        (["--ha_backend_connstring=h:1", "--etcd_endpoints=i:1"], "contradict each other"),
        (["--ha_backend_connstring=redis://h:1"], "contradicts --ha_backend_type=etcd"),
    ],
)
def test_flags_that_do_not_go_together(flags, part):
    with pytest.raises(ConfigError) as caught:
        text_of(*flags)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--ha_backend_connstring=h:many"], "'h:many' is not a HOST:PORT"),
        (["--ha_backend_type=consul"], "--ha_backend_type is wrong: expected one of etcd, redis, k8s"),
        (["--ha_backend_type=k8s", "--ha_backend_connstring=kv/pool"], "MOONCAKE_K8S_API_SERVER"),
        (["--ha_backend_type=redis", "--ha_backend_connstring=h:1/x"], "expected redis://"),
    ],
)
def test_a_master_says_what_is_wrong_and_ends(flags, part, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    own = [f"--rpc_port={free_port()}", "--rpc_address=127.0.0.1", "--metrics_port=0", "--metrics_host=127.0.0.1"]
    argv = [BIN / "mooncake_master", "--enable_ha", *own, *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert part in done.stderr


def test_settings_without_the_switch():
    found = read_settings(parse_command_line(["--ha_backend_type=redis", "--ha_backend_connstring=h:1"]))
    assert [note.partition(" has")[0] for note in found.notes] == [
        "--ha_backend_type=redis",
        "--ha_backend_connstring=h:1",
    ]


# ---------------------------------------------------------------- the address that is published

_PUBLISH = """
from mooncake.errors import ConfigError
from mooncake.master.ha_settings import published_address
values = {"ha_backend_type": "redis", "ha_backend_connstring": "127.0.0.1:6379", "etcd_endpoints": ""}
try:
    print(published_address("0.0.0.0", 50051, values))
except ConfigError as error:
    print("refused:", error)
"""


def publish(python, *setup: str) -> str:
    """In a network namespace of its own."""
    commands = "; ".join(("ip link set lo up", *setup, 'exec "$@"'))
    argv = ["unshare", "--net", "sh", "-ec", commands, "sh", python, "-c", _PUBLISH]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout


def test_an_address_that_was_given_is_published():
    assert published_address("10.1.2.3", 50051, {}) == "10.1.2.3:50051"
    assert published_address("fd00::1", 50051, {}) == "[fd00::1]:50051"


def test_every_address_is_none_to_publish():
    if subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    found = publish(sys.executable)
    assert found.startswith("refused: --rpc_address=0.0.0.0 with --enable_ha")
    assert "give --rpc_address=ADDRESS" in found
    link = (
        "ip link add v0 type veth peer name v1",
        "ip addr add 10.9.8.7/24 dev v0",
        "ip link set v0 up",
        "ip link set v1 up",
        "ip route add default dev v0",
    )
    assert publish(sys.executable, *link) == "10.9.8.7:50051\n"
