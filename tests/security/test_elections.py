"""Masters that elect a leader, among members that speak TLS and prove who they are: a standby and who is elected later
are as strict as one that stands alone."""

import contextlib
import http.client
import json
import subprocess

import pytest

from mooncake.errors import ErrorCode, StoreError
from mooncake.rpc.client import Connection
from mooncake.rpc.sockets import connect, set_time_limit
from mooncake.security import tls
from mooncake.security.credential import Credential
from mooncake.security.tls_files import EXPECTED
from mooncake.store import MooncakeDistributedStore
from tests.ha.backends import Backend
from tests.processes import BIN, Master, free_port, wait_until
from tests.security.tls_ports import HELLO, plain_answer

MIB = 1 << 20
SECRET, ADMIN = "a-secret-of-the-cluster", "a-key-of-the-administrator"


@pytest.fixture
def backend(cleanup, tmp_path):
    made = Backend("redis", tmp_path)
    cleanup.callback(made.service.close)
    return made


@pytest.fixture
def masters(encrypted, backend, tenants, cleanup, tmp_path, monkeypatch):
    """The leader, and a standby."""
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", SECRET)
    monkeypatch.setenv("MOONCAKE_ADMIN_KEY", ADMIN)
    made = []
    for i in range(2):
        made.append(Master(*backend.flags, *tenants, log=tmp_path / f"master-{i}.log"))
        cleanup.callback(made[-1].stop)
        wait_until(lambda: "leader" in roles(made), 15, "a leader")
    wait_until(lambda: sorted(roles(made)) == ["leader", "standby"], 15, "a standby")
    return sorted(made, key=lambda master: role(master))


@pytest.fixture
def tenants(tmp_path, monkeypatch):
    """Flags; this process is tenant `a`."""
    credential, text = Credential.new("a")
    monkeypatch.setenv("MOONCAKE_TENANT_TOKEN", text)
    path, quotas = tmp_path / "credentials", tmp_path / "quotas.yaml"
    path.write_text(f"a:{credential.verifier.hex()}\n")
    quotas.write_text("version: 1\ntenants:\n- {name: a, quota: 64MB}\n")
    path.chmod(0o600)
    return "--enable_multi_tenants", f"--tenant_quota_connector_uri={quotas}", f"--tenant_credentials_file={path}"


def ask(master: Master, path: str, method: str = "GET", token: str = "") -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    context = tls.contexts().client
    connection = http.client.HTTPSConnection("127.0.0.1", master.metrics_port, timeout=5, context=context)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def role(master: Master) -> str:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return json.loads(ask(master, "/health")[1])["role"]
    return ""


def roles(masters: list[Master]) -> list[str]:
    return [role(master) for master in masters]


def test_a_standby_is_as_strict(masters):
    leader, standby = masters
    assert EXPECTED.encode() in plain_answer(standby.metrics_port)
    for master, name in ((leader, b"leader"), (standby, b"standby")):
        assert ask(master, "/role")[0] == 401
        assert ask(master, "/role", token=SECRET) == ask(master, "/role", token=ADMIN) == (200, name)
        assert ask(master, "/get_all_keys", token=SECRET)[0] == 401
        assert ask(master, "/api/v1/remove_all", "POST", SECRET)[0] == 401
    assert ask(standby, "/api/v1/remove_all", "POST", ADMIN)[0] == 503
    with contextlib.closing(Connection(connect("127.0.0.1", standby.port, 3))) as connection:
        set_time_limit(connection.sock, 3)
        with pytest.raises(StoreError) as refused:
            connection.greet(HELLO)
        assert refused.value.code == ErrorCode.UNAVAILABLE_IN_CURRENT_STATUS


def test_who_is_elected_later_is_as_strict(masters, backend, cleanup, monkeypatch, caplog):
    leader, standby = masters
    store = MooncakeDistributedStore()
    cleanup.callback(store.close)
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 32 * MIB, MIB, "tcp", "", backend.address) == 0
    assert wait_until(lambda: store.put("k", b"value") == 0)
    leader.kill()
    wait_until(lambda: role(standby) == "leader", 15, "the other's election")
    wait_until(lambda: store.get("k") == b"value", 10, "the value")
    assert store.put("later", b"v") == 0
    assert EXPECTED.encode() in plain_answer(standby.metrics_port)
    assert ask(standby, "/get_all_keys?tenant_id=a", token=SECRET)[0] == 401
    status, keys = ask(standby, "/get_all_keys?tenant_id=a", token=ADMIN)
    assert (status, sorted(keys.split())) == (200, [b"k", b"later"])
    monkeypatch.delenv("MOONCAKE_TENANT_TOKEN")
    assert MooncakeDistributedStore().setup("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", backend.address) == -1
    assert "must be proved here" in caplog.text


def test_a_standby_says_at_once_what_it_could_not_serve_with(backend, tenants, monkeypatch):
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", "")
    ports = f"--rpc_port={free_port()}", f"--metrics_port={free_port()}"
    argv = [str(BIN / "mooncake_master"), "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", *ports]
    done = subprocess.run([*argv, *backend.flags, *tenants], capture_output=True, text=True, timeout=10)
    assert done.returncode == 1
    assert "--tenant_credentials_file needs the cluster's secret" in done.stderr
