"""The files of TLS: what is wrong with them is said at once, and new ones are taken without a restart."""

import logging
import os
import socket
import subprocess

import pytest

from mooncake.client.http import ClientHttpServer
from mooncake.engine import TransferEngine
from mooncake.errors import ConfigError
from mooncake.security import tls
from mooncake.security.tls_files import read_files
from mooncake.store import MooncakeDistributedStore
from tests.processes import BIN, wait_until
from tests.security.conftest import NAMES
from tests.security.tls_ports import is_served, tried
from tests.wire import greeted, segments

MIB = 1 << 20


def tcp_port(address: str) -> int:
    return int(address.rpartition(":")[2])


def broken(kind: str, folder, authority, issued, foreign, issued_elsewhere) -> tuple[dict[str, str], str]:
    """Variables that name something wrong, and words of the error."""
    cert, key = issued
    good = authority.variables(cert, key)
    folder.mkdir(exist_ok=True)
    text = folder / "text"
    text.write_text("this is no key")
    if kind == "half":
        return {**good, "MOONCAKE_TLS_KEY": ""}, "MOONCAKE_TLS_KEY must be set too"
    if kind == "missing":
        return {**good, "MOONCAKE_TLS_CERT": str(folder / "none")}, "none that MOONCAKE_TLS_CERT names cannot be read"
    if kind == "folder":
        return {**good, "MOONCAKE_TLS_CA": str(folder)}, "cannot be read"
    if kind == "other key":
        return {**good, "MOONCAKE_TLS_KEY": str(issued_elsewhere[1])}, "is not that of the certificate"
    if kind == "expired":
        return authority.variables(*authority.issue("expired", days=-1)), "certificate has expired"
    if kind == "other authority":
        return {**good, "MOONCAKE_TLS_CA": str(foreign.path)}, "is not accepted by the authority"
    if kind == "no certificate":
        return {**good, "MOONCAKE_TLS_CERT": str(text)}, "holds no certificate"
    if kind == "no key":
        return {**good, "MOONCAKE_TLS_KEY": str(text)}, "holds no private key"
    if kind == "no authority":
        return {**good, "MOONCAKE_TLS_CA": str(text)}, "holds no certificate"
    return {**good, "MOONCAKE_TLS_CHECK_HOST": "perhaps"}, "expected 1"


WRONG = ["half", "missing", "folder", "other key", "expired", "other authority", "no certificate", "no key"]
WRONG += ["no authority", "check"]


@pytest.mark.parametrize("kind", WRONG)
def test_files_that_are_wrong(monkeypatch, tmp_path, authority, issued, foreign, issued_elsewhere, kind):
    variables, words = broken(kind, tmp_path / "wrong", authority, issued, foreign, issued_elsewhere)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        tls.contexts()
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    before = len(os.listdir("/proc/self/fd"))
    assert TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
    with pytest.raises(ConfigError):
        ClientHttpServer(0, lambda: True, list)
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, MIB, "tcp", "", "127.0.0.1:1") != 0
    assert len(os.listdir("/proc/self/fd")) == before, "something was opened"


def test_a_master_says_so_in_one_line(monkeypatch, tmp_path, authority, issued, issued_elsewhere):
    environment = {**os.environ, **authority.variables(issued[0], issued_elsewhere[1])}
    done = subprocess.run(
        [BIN / "mooncake_master", "--rpc_port=0", "--metrics_port=0"],
        env=environment, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "is not that of the certificate" in line


def test_a_masters_flags_name_them_too(speaks, make_master, authority, issued):
    speaks("plain")
    cert, key = issued
    master = make_master(f"--tls_cert_file={cert}", f"--tls_key_file={key}", f"--tls_ca_file={authority.path}")
    speaks("tls")
    assert is_served("rpc", master.port)


def subject(port: int) -> str:
    """Whose certificate a port shows now."""
    found = tls.contexts()
    with (
        socket.create_connection(("127.0.0.1", port), 5) as sock,
        found.client.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped,
    ):
        return dict(one[0] for one in wrapped.getpeercert()["subject"])["commonName"]


def test_new_files_are_taken_for_new_connections(
    monkeypatch, authority, make_master, make_worker, tmp_path, cleanup, caplog
):
    """While old connections go on; a file that is wrong meanwhile changes nothing."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(name: str) -> None:
        made, its_key = authority.issue(name)
        for source, target in ((its_key, key), (made, cert)):
            beside = target.with_suffix(".new")
            beside.write_bytes(source.read_bytes())
            beside.rename(target)

    install("first")
    for name, path in authority.variables(cert, key).items():
        monkeypatch.setenv(name, path)
    master = make_master()
    owner = make_worker(16 * MIB, at=master)
    assert owner("result = store.put('k', b'v' * 1000)") == 0
    old = greeted(master.port)
    (info,) = segments(old, "k")
    probe = ClientHttpServer(0, lambda: True, list)
    cleanup.callback(probe.close)
    wait_until(lambda: tried(master.metrics_port, "/health"))
    doors = (master.port, tcp_port(info.tcp), master.metrics_port, probe.port)
    assert [subject(port) for port in doors] == ["first"] * 4
    install("second")
    assert [subject(port) for port in doors] == ["second"] * 4
    key.write_text("half of a k")
    with caplog.at_level(logging.WARNING):
        assert [subject(port) for port in doors] == ["second"] * 4
        assert [subject(port) for port in doors] == ["second"] * 4
    assert caplog.text.count("goes on being used") == 1, "once a change"
    install("third")
    assert [subject(port) for port in doors] == ["third"] * 4
    assert segments(old, "k") == [info], "who was there stays"
    assert owner("result = store.get('k') == b'v' * 1000")
    old.close()


def test_nothing_is_said_without_the_variables(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert read_files() is None
    assert tls.contexts() is None
