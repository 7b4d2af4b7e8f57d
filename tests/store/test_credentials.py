"""Tenants that prove who they are: nobody else is them, whichever way he asks."""

import json
import logging
import os
import re
import secrets
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mooncake.client.prefixes import PrefixClient
from mooncake.errors import ConfigError, ErrorCode, StoreError
from mooncake.master.flag_table import BY_NAME
from mooncake.master.tenants.credentials import Credentials
from mooncake.rpc.client import Connection
from mooncake.rpc.messages import (
    PROTOCOL,
    Exist,
    GetStart,
    Heartbeat,
    Hello,
    Need,
    Ping,
    Prefix,
    Prove,
    PutStart,
    Query,
    Remove,
    RemoveAll,
    RemoveRegex,
    SegmentQuery,
)
from mooncake.rpc.sockets import connect, set_time_limit
from mooncake.security.credential import Credential, proves, read_credential
from mooncake.security.secret import CLIENT, Secret, new_nonce
from mooncake.store import MooncakeDistributedStore
from tests.processes import BIN, wait_until

MIB = 1 << 20
SECRET = "a-secret-of-the-cluster"
ADMIN = "the-key-of-the-administrator"


class Tenant:
    def __init__(self, name: str) -> None:
        self.credential, self.text = Credential.new(name)
        self.line = f"{name}:{self.credential.verifier.hex()}\n"


@pytest.fixture
def team():
    return {name: Tenant(name) for name in ("a", "b", "default")}


@pytest.fixture
def credentials_file(tmp_path, team):
    path = tmp_path / "credentials"
    path.write_text("# who is who\n\n" + "".join(tenant.line for tenant in team.values()))
    path.chmod(0o600)
    return path


@pytest.fixture
def master(make_master, tmp_path, credentials_file, monkeypatch):
    """With the tenants a, b and default."""
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", SECRET)
    monkeypatch.setenv("MOONCAKE_ADMIN_KEY", ADMIN)
    quotas = tmp_path / "quotas.yaml"
    names = "\n".join(f"- {{name: {name}, quota: 16MB}}" for name in ("a", "b", "default"))
    quotas.write_text(f"version: 1\ntenants:\n{names}\n")
    return make_master(
        "--enable_multi_tenants",
        f"--tenant_quota_connector_uri={quotas}",
        f"--tenant_credentials_file={credentials_file}",
    )


@pytest.fixture
def join(master, team, monkeypatch, cleanup):
    """(code, store) of one with a credential who asks for a tenant."""

    def join(credential: str, tenant: str = "default", segment: int = 0):
        monkeypatch.setenv("MOONCAKE_TENANT_TOKEN", team[credential].text if credential in team else credential)
        store = MooncakeDistributedStore()
        arguments = ("127.0.0.1", "P2PHANDSHAKE", segment, 4 * MIB, "tcp", "", master.address)
        code = store.setup(*arguments, tenant_id=tenant)
        if code == 0:
            assert store.put("warm", b"x") in (0, -200, -600)  # its connections stay who they are
        cleanup.callback(store.close)
        return code, store

    return join


def test_a_connection_is_who_its_credential_says(join):
    code, a = join("a", segment=64 * MIB)
    assert code == 0
    assert a.put("k", b"of a") == 0
    code, also_a = join("a", "a")
    assert code == 0
    assert also_a.get("k") == b"of a"
    code, b = join("b", "b")
    assert code == 0
    assert b.is_exist("k") == 0


@pytest.mark.parametrize(
    ("credential", "asked", "says"),
    [
        ("a", "b", "the credential in MOONCAKE_TENANT_TOKEN is that of 'a'"),
        ("", "a", "tenant 'a' must be proved here; set MOONCAKE_TENANT_TOKEN"),
        ("", "default", "tenant 'default' must be proved here"),
        ("a:" + "0" * 64, "a", "tenant 'a' must be proved here"),
        ("nobody:" + "0" * 64, "nobody", "tenant 'nobody' must be proved here"),
        ("no credential", "a", "is no credential: expected NAME:TOKEN"),
    ],
)
def test_nobody_is_somebody_else(join, caplog, credential, asked, says):
    with caplog.at_level(logging.ERROR):
        code, _ = join(credential, asked)
    assert code != 0
    assert says in caplog.text
    assert caplog.text.count("Traceback") == 0


def knocked(master, role: str, tenant: str, proof) -> Connection:
    """A connection that says what no client of ours would; `proof` of both nonces."""
    connection = Connection(connect("127.0.0.1", master.port, 2))
    set_time_limit(connection.sock, 5)
    nonce, secret = new_nonce(), Secret(SECRET)
    hello = Hello(PROTOCOL, "test", role, "7-7", "elsewhere", nonce, tenant)
    welcome = connection.call(hello)
    connection.call(Prove(secret.proof(CLIENT, nonce, welcome.challenge), proof(nonce, welcome.challenge)))
    return connection


def test_proofs_are_of_one_connection_and_one_name(master, team):
    a, b = team["a"].credential, team["b"].credential
    good = knocked(master, "client", "a", a.proof)
    assert good.call(Ping()).codes == [0]
    seen = []

    def remember(*nonces):
        seen.append(a.proof(*nonces))
        return seen[-1]

    knocked(master, "client", "a", remember).close()
    for tenant, proof in (
        ("b", a.proof),
        ("a", b.proof),
        ("a", lambda *_: seen[0]),
        ("a", lambda *_: b""),
        ("a", lambda *_: a.verifier),
        ("a", lambda *_: bytes(32)),
        ("a", lambda *_: b"x" * 4000),
    ):
        with pytest.raises(StoreError, match="must be proved") as refused:
            knocked(master, "client", tenant, proof)
        assert refused.value.code == ErrorCode.ILLEGAL_CLIENT
    good.close()


def test_the_verifier_does_not_make_a_proof():
    credential, _ = Credential.new("a")
    client, server = new_nonce(), new_nonce()
    proof = credential.proof(client, server)
    assert proves(proof, [secrets.token_bytes(32), credential.verifier], "a", client, server)
    assert not proves(proof, [credential.verifier], "b", client, server)
    assert not proves(proof, [credential.verifier], "a", server, client)
    assert not proves(credential.verifier, [credential.verifier], "a", client, server)
    assert not proves(proof, [], "a", client, server)
    assert credential.verifier.hex() not in repr(credential)


def test_a_segments_connection_asks_for_no_key(master, join):
    """It has the cluster's secret, and is of no tenant."""
    _, a = join("a", segment=64 * MIB)
    assert a.put("k", b"of a") == 0
    key = "\x1fa\x1fk"  # as the directory knows it
    segment = knocked(master, "segment", "a", lambda *_: b"")
    assert segment.call(Ping()).codes == [0]
    for question in (
        Exist([key]), GetStart([key]), Query([key]), Prefix([Need([""])], [[key]], 1), Remove([key], True),
        RemoveRegex(".*", True), RemoveAll(True), PutStart([key], [10]), SegmentQuery([1]),
    ):  # fmt: skip
        with pytest.raises(StoreError, match="is not for the master from here"):
            segment.call(question)
    segment.close()
    assert a.get("k") == b"of a"


def test_a_tenants_connection_announces_nothing(master, team):
    """What a segment server announces has the keys of all."""
    b = knocked(master, "client", "b", team["b"].credential.proof)
    with pytest.raises(StoreError, match="is not for the master from here"):
        b.call(Heartbeat([1]))
    b.close()


def test_nobody_goes_under_another_tenants_client_id(master, team):
    """He could end its puts."""
    a = knocked(master, "client", "a", team["a"].credential.proof)
    with pytest.raises(StoreError, match="another tenant's client"):
        knocked(master, "client", "b", team["b"].credential.proof)
    knocked(master, "client", "a", team["a"].credential.proof).close()
    a.close()


def test_schedulers_prove_it_too(master, join, team, monkeypatch):
    _, a = join("a", segment=64 * MIB)
    assert a.put("p-1", b"x") == 0
    lookups = PrefixClient(master.address, 5.0)
    assert lookups.lengths(["p-"], [["1"]]) == [1]
    lookups.close()
    monkeypatch.setenv("MOONCAKE_TENANT_TOKEN", team["b"].text)
    others = PrefixClient(master.address, 5.0)
    assert others.lengths(["p-"], [["1"]]) == [0]
    others.close()


# ------------------------------------------------------------ the administrator


def asked(master, path: str, method: str = "GET", token: str = "", body: bytes | None = None) -> int:
    url = f"http://127.0.0.1:{master.metrics_port}{path}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 401:
                assert "MOONCAKE_" in json.loads(error.read())["error_message"]
            return error.code


CHANGES = [
    ("/api/v1/remove_all?force=true&tenant_id=a", "POST"),
    ("/api/v1/snapshots", "POST"),
    ("/api/v1/drain_jobs", "POST"),
    ("/api/v1/drain_jobs/cancel?job_id=1-1", "POST"),
    ("/api/v1/tenant_quotas?tenant_id=a", "PUT"),
    ("/api/v1/tenant_quotas?tenant_id=a", "DELETE"),
]
SHOWS_KEYS = ["/query_key?key=k&tenant_id=a", "/batch_query_keys?keys=k", "/get_all_keys?tenant_id=a"]


def test_what_changes_anything_needs_the_admin_key(master, join):
    _, a = join("a", segment=64 * MIB)
    assert a.put("k", b"of a") == 0
    wait_until(lambda: asked(master, "/health") == 200)
    for token in ("", SECRET, "another-secret-than-that"):
        for path, method in CHANGES:
            assert asked(master, path, method, token) == 401, (path, token)
        for path in SHOWS_KEYS:
            assert asked(master, path, token=token) == 401, (path, token)
    assert a.is_exist("k") == 1
    assert asked(master, "/metrics") == 401
    for token in (SECRET, ADMIN):
        assert asked(master, "/metrics", token=token) == 200
    for path in SHOWS_KEYS:
        assert asked(master, path, token=ADMIN) == 200
    assert asked(master, *CHANGES[0], token=ADMIN) == 200
    assert a.is_exist("k") == 0


def test_every_route_that_changes_anything_is_known_here():
    """A new one must be tried as well: nothing but GET is a reading route, and no GET changes anything."""
    import inspect

    from mooncake.master import admin, drain_admin
    from mooncake.master.tenants import admin as tenant_admin

    source = "".join(inspect.getsource(module) for module in (admin, drain_admin, tenant_admin))
    routes = set(re.findall(r'(?:post|put|delete|add_post|add_put|add_delete)\(\s*("[^"]+"|route)', source))
    assert {route.strip('"') for route in routes if route != "route"} == {
        "/api/v1/remove_all", "/api/v1/snapshots", "/api/v1/drain_jobs", "/api/v1/drain_jobs/cancel",
    }  # fmt: skip


# ------------------------------------------------------------ files


def test_the_command_makes_one(tmp_path, team):
    done = subprocess.run([BIN / "mooncake", "tenant", "c"], capture_output=True, text=True, timeout=30, check=True)
    text, line = (row.partition(": ")[2] for row in done.stdout.splitlines())
    path = tmp_path / "credentials"
    path.write_text(line)
    path.chmod(0o600)
    made = Credential(*text.rsplit(":", 1))
    nonces = new_nonce(), new_nonce()
    assert Credentials(str(path)).check("c", made.proof(*nonces), *nonces)
    assert text.split(":")[1] not in line
    wrong = subprocess.run([BIN / "mooncake", "tenant", "_x"], capture_output=True, text=True, timeout=30, check=False)
    assert wrong.returncode == 1
    assert len(wrong.stderr.splitlines()) == 1


def test_a_changed_file_is_read_again(credentials_file, team, monkeypatch, caplog):
    known = Credentials(str(credentials_file))
    clock = [1e6]
    monkeypatch.setattr("mooncake.master.tenants.credentials.time.monotonic", lambda: clock[0])
    known._looked = clock[0]
    new = Tenant("a")
    nonces = new_nonce(), new_nonce()

    def holds(tenant: Tenant) -> bool:
        clock[0] += 2
        return known.check("a", tenant.credential.proof(*nonces), *nonces)

    assert holds(team["a"])
    assert not holds(new)
    credentials_file.write_text(team["a"].line + new.line)
    assert holds(team["a"])
    assert holds(new), "both hold while clients change over"
    with caplog.at_level(logging.WARNING):
        credentials_file.write_text("nonsense")
        assert holds(new)
        assert holds(new)
    assert caplog.text.count("go on being used") == 1
    credentials_file.write_text(new.line)
    assert not holds(team["a"])
    assert holds(new)


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        ("a:" + "0" * 64, 0o660, "can be written by others"),
        ("a:" + "0" * 64, 0o602, "can be written by others"),
        ("a:00", 0o600, "wrong in line 1: expected NAME:VERIFIER"),
        ("\n_a:" + "0" * 64, 0o600, "wrong in line 2"),
        ("a" + "0" * 64, 0o600, "wrong in line 1"),
        ("#" * (1 << 20) + "\n", 0o600, "is larger than"),
        (None, 0, "cannot be read"),
    ],
)
def test_a_file_that_is_wrong(tmp_path, content, mode, says):
    path = tmp_path / "credentials"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        Credentials(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_of_another_user(tmp_path):
    path = tmp_path / "credentials"
    path.write_text("")
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        Credentials(str(path))


def test_without_a_secret_they_prove_nothing(tmp_path, credentials_file, monkeypatch):
    monkeypatch.delenv("MOONCAKE_AUTH_TOKEN", raising=False)
    done = subprocess.run(
        [BIN / "mooncake_master", "--enable_multi_tenants", f"--tenant_credentials_file={credentials_file}"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "--tenant_credentials_file needs the cluster's secret" in line


def test_a_clients_file(tmp_path, monkeypatch):
    path = tmp_path / "credential"
    monkeypatch.delenv("MOONCAKE_TENANT_TOKEN", raising=False)
    monkeypatch.setenv("MOONCAKE_TENANT_TOKEN_FILE", str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_credential()
    credential, text = Credential.new("a:b")
    path.write_text(text + "\n")
    read = read_credential()
    assert (read.tenant, read.verifier) == ("a:b", credential.verifier)
    assert text.rpartition(":")[2] not in repr(read)


def test_the_documented_commands():
    page = (Path(__file__).parents[2] / "docs" / "tenants.md").read_text()
    assert "    mooncake tenant team-a\n" in page
    for flag in re.findall(r"--(\w+)=", page):
        assert flag in BY_NAME or flag in ("host", "global_segment_size"), flag
