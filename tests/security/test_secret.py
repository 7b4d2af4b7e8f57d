"""A cluster with a secret: whoever knows it notices nothing, whoever does not gets nothing and slows nobody."""

import json
import logging
import socket
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from mooncake.engine import RpcInterface, TransferEngine
from mooncake.errors import ConfigError, ErrorCode, StoreError
from mooncake.http_metadata_server import KVBootstrapServer
from mooncake.rpc import frame
from mooncake.rpc.client import Connection
from mooncake.rpc.data_messages import Attach, Read
from mooncake.rpc.engine_messages import EngineOpen
from mooncake.rpc.messages import KINDS, PROTOCOL, Exist, Hello, Ping, Prove, encode
from mooncake.rpc.sockets import connect, set_time_limit
from mooncake.security.anteroom import LIMIT
from mooncake.security.secret import CLIENT, SERVER, Secret, new_nonce, read_secret, warn_if_exposed
from mooncake.store import MooncakeDistributedStore
from tests.processes import children, wait_until
from tests.wire import greeted, segments

SECRET = "a secret of the cluster".replace(" ", "-")
OTHER = "another-secret-than-that"
MIB = 1 << 20


@pytest.fixture
def secret(monkeypatch):
    """Set before any process of the cluster starts."""
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", SECRET)
    return Secret(SECRET)


@pytest.fixture(params=["", OTHER], ids=["none", "other"])
def stranger(request):
    """Makes this process one that does not know the secret."""

    def become(monkeypatch):
        monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", request.param)

    return become


def raw(port: int, host: str = "127.0.0.1") -> Connection:
    connection = Connection(connect(host, port, 1))
    set_time_limit(connection.sock, 5)
    return connection


def tcp_port(address: str) -> int:
    return int(address.rpartition(":")[2])


# ------------------------------------------------------------ who knows it


@pytest.mark.parametrize("force_tcp", ["", "1"])
def test_who_knows_it_notices_nothing(secret, make_store, make_worker, monkeypatch, force_tcp):
    monkeypatch.setenv("MC_FORCE_TCP", force_tcp)
    owner = make_worker(16 * MIB)
    store = make_store(0)
    assert store.put("k", b"v" * MIB) == 0
    assert owner("result = store.get('k') == b'v' * (1 << 20)")
    assert store.transfer_stats()["tcp" if force_tcp else "shm"] >= MIB


def test_a_file_may_hold_it(secret, master, make_store, monkeypatch, tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    monkeypatch.delenv("MOONCAKE_AUTH_TOKEN")
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN_FILE", str(path))
    store = make_store(16 * MIB)
    assert store.put("k", b"v") == 0
    assert store.get("k") == b"v"


def engine() -> TransferEngine:
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made


@pytest.mark.parametrize("force_tcp", ["", "1"])
def test_engines(secret, monkeypatch, force_tcp):
    monkeypatch.setenv("MC_FORCE_TCP", force_tcp)
    one, other = engine(), engine()
    memory = np.zeros(2 * MIB, np.uint8)
    memory[:MIB] = 7
    assert other.register_memory(memory.ctypes.data, memory.nbytes) == 0
    session = f"127.0.0.1:{other.get_rpc_port()}"
    assert one.transfer_sync_write(session, memory.ctypes.data, memory.ctypes.data + MIB, MIB) == 0
    assert (memory[MIB:] == 7).all()
    assert one.send_probe(session) == 0
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", OTHER)
    third = engine()
    assert third.send_probe(session) != 0
    assert third.transfer_sync_read(session, memory.ctypes.data, memory.ctypes.data + MIB, MIB) == -1


def test_rpc_interface(secret, monkeypatch):
    server, client = RpcInterface(), RpcInterface()
    heard = []
    (port,) = free_port_of()
    assert server.initialize_server(f"127.0.0.1:{port}", 2)
    server.set_data_receive_callback(lambda data: heard.append(data.get_bytes()))
    assert server.start_server_async()
    try:
        assert client.initialize_client(2)
        assert client.send_data(f"127.0.0.1:{port}", b"hello") == 0
        monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", OTHER)
        foreign = RpcInterface()
        assert foreign.initialize_client(2)
        assert foreign.send_data(f"127.0.0.1:{port}", b"hello") == -1
        assert heard == [b"hello"]
    finally:
        server.stop_server()


def free_port_of() -> list[int]:
    from mooncake.cli.loopback import free_ports

    return free_ports(1)


def test_a_metadata_service(secret, monkeypatch):
    server = KVBootstrapServer(0, "127.0.0.1")
    server.run()
    url = f"http://127.0.0.1:{server.port}/metadata"
    try:
        one = TransferEngine()
        assert one.initialize("127.0.0.1:7711", url, "tcp", "") == 0
        asked = urllib.request.Request(f"{url}?key=mooncake/rpc_meta/127.0.0.1:7711")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=5)
        assert refused.value.code == 401
        monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", "")
        assert TransferEngine().initialize("127.0.0.1:7712", url, "tcp", "") == -1
    finally:
        server.close()


# ------------------------------------------------------------ who does not


def test_a_stranger_cannot_join(secret, master, stranger, monkeypatch, caplog):
    stranger(monkeypatch)
    store = MooncakeDistributedStore()
    with caplog.at_level(logging.ERROR):
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, MIB, "tcp", "", master.address) != 0
    assert "MOONCAKE_AUTH_TOKEN" in caplog.text
    store.close()


def test_who_knows_it_does_not_speak_with_who_does_not(master, monkeypatch, caplog):
    """A master that somebody else put there learns nothing."""
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", SECRET)
    store = MooncakeDistributedStore()
    with caplog.at_level(logging.ERROR):
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", master.address) != 0
    assert "knows no secret" in caplog.text
    store.close()


HELLO = Hello(PROTOCOL, "test", "client", "1-1", "elsewhere")


def refusal(connection: Connection, *messages) -> str:
    """What the last of these is answered with, which must be an error."""
    try:
        for message in messages:
            connection.call(message)
    except StoreError as error:
        assert error.code == ErrorCode.ILLEGAL_CLIENT or "Hello" in str(error)
        return str(error)
    except OSError:
        return "closed"
    raise AssertionError(f"{messages[-1]} was answered")


def test_requests_without_a_proof(secret, master, make_worker):
    """To each port of each process; none is served, and each says why or closes."""
    owner = make_worker(16 * MIB)
    assert owner("result = store.put('k', b'v' * 1000)") == 0
    friend = greeted(master.port)
    (info,) = segments(friend, "k")
    nonce = new_nonce()
    half = Hello(PROTOCOL, "test", "client", "1-1", "elsewhere", nonce)
    wrong = Prove(Secret(OTHER).proof(CLIENT, nonce, nonce))
    read = Read(info.segment, [0, 1000], 0, 0)
    for port, question in ((master.port, Exist(["k"])), (tcp_port(info.tcp), read)):
        for messages in ((question,), (HELLO,), (half, question), (half, wrong), (half, wrong, question), (wrong,)):
            connection = raw(port)
            refusal(connection, *messages)
            connection.close()
    for messages in ((Attach(info.segment),), (half, Attach(info.segment)), (half, wrong, Attach(info.segment))):
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(5)
        link.connect("\0" + info.unix[1:])
        for number, message in enumerate(messages, 1):
            link.sendall(frame.pack(KINDS[type(message)], frame.REQUEST, number, encode(message)))
            data, descriptors, _, _ = socket.recv_fds(link, 4096, 4)
            assert not descriptors
        assert b"MOONCAKE_AUTH_TOKEN" in data or b"proof" in data
        link.close()
    friend.close()


def test_an_engine_without_a_proof(secret):
    made = engine()
    for message in (EngineOpen(0, 0, ""), Ping(), HELLO):
        connection = raw(made.get_rpc_port())
        refusal(connection, message)
        connection.close()


def test_a_proof_is_worth_nothing_anywhere_else(secret, master):
    """Neither on another connection nor as the other side's."""
    one, other = raw(master.port), raw(master.port)
    nonce = new_nonce()
    hello = Hello(PROTOCOL, "test", "client", "1-1", "elsewhere", nonce)
    first, second = one.call(hello), other.call(hello)
    assert secret.proves(first.proof, SERVER, nonce, first.challenge)
    refusal(other, Prove(secret.proof(CLIENT, nonce, first.challenge)))
    refusal(one, Prove(first.proof))
    assert first.challenge != second.challenge
    for connection in (one, other):
        connection.close()


@pytest.mark.parametrize("port", ["master", "tcp"])
def test_strangers_slow_nobody(secret, master, make_worker, make_store, port):
    """A crowd that says nothing, or the first half of something long, is bounded and does not hold anybody up."""
    owner = make_worker(16 * MIB)
    assert owner("result = store.put('k', b'v' * 1000)") == 0
    friend = greeted(master.port)
    (info,) = segments(friend, "k")
    number = master.port if port == "master" else tcp_port(info.tcp)
    crowd = []
    for i in range(600):
        sock = socket.create_connection(("127.0.0.1", number), 1)
        if i % 2:
            sock.sendall(frame.HEADER.pack(200 << 20, KINDS[Hello], 0, 1) + b"x" * 100)
        crowd.append(sock)
        if i % 100 == 99:
            began = time.monotonic()
            connection = raw(number)
            connection.greet(HELLO)
            assert time.monotonic() - began < LIMIT, "it waited for strangers to go"
            connection.close()
    assert owner("result = store.get('k') == b'v' * 1000")
    (server,) = children(owner.pid)
    victim = master.process.pid if port == "master" else server
    wait_until(lambda: sockets(victim) < 60, 3 * LIMIT, "strangers have been sent away")
    for sock in crowd:
        sock.close()
    friend.close()


def sockets(pid: int) -> int:
    import os

    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            count += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
        except OSError:
            pass
    return count


def test_the_admin_interface(secret, master, make_store):
    store = make_store(16 * MIB)
    assert store.put("k", b"v") == 0
    url = f"http://127.0.0.1:{master.metrics_port}"
    for path, method in (("/metrics", "GET"), ("/get_all_keys", "GET"), ("/api/v1/remove_all?force=true", "POST")):
        for headers in ({}, {"Authorization": f"Bearer {OTHER}"}, {"Authorization": SECRET}):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(url + path, headers=headers, method=method), timeout=5)
            assert refused.value.code == 401
            assert "MOONCAKE_AUTH_TOKEN" in json.loads(refused.value.read())["error_message"]
    assert store.is_exist("k") == 1
    with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        assert answer.status == 200
    known = urllib.request.Request(f"{url}/get_all_keys", headers=secret.header())
    with urllib.request.urlopen(known, timeout=5) as answer:
        assert answer.read().decode().split() == ["k"]


# ------------------------------------------------------------ settings


@pytest.mark.parametrize("text", ["short", "with a space in it", "ümlaut-ümlaut-ümlaut", "line\nbreak-and-so-on"])
def test_bad_secrets(monkeypatch, text):
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", text)
    with pytest.raises(ConfigError, match="MOONCAKE_AUTH_TOKEN is no secret: expected 16"):
        read_secret()


def test_bad_files(monkeypatch, tmp_path):
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret()
    (tmp_path / "none").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_secret()


def test_it_is_never_shown():
    assert SECRET not in repr(Secret(SECRET)) + str(Secret(SECRET))


def test_the_open_door_is_named(caplog):
    log = logging.getLogger("mooncake.test")
    for host, warns in (("0.0.0.0", 1), ("::", 1), ("", 1), ("10.0.0.1", 1), ("127.0.0.1", 0), ("::1", 0)):
        caplog.clear()
        warn_if_exposed(log, "this one", host, None)
        warn_if_exposed(log, "this one", host, Secret(SECRET))
        assert len(caplog.records) == warns, host


@pytest.mark.parametrize(
    ("rpc", "http", "warns"), [("0.0.0.0", "127.0.0.1", 1), ("127.0.0.1", "0.0.0.0", 1), ("127.0.0.1", "127.0.0.1", 0)]
)
def test_a_master_warns_once(make_master, tmp_path, rpc, http, warns):
    log = tmp_path / "log"
    master = make_master(f"--rpc_address={rpc}", f"--metrics_host={http}", log=log)
    master.get("/health")
    assert log.read_text().count("knows no secret") == warns
