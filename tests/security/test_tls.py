"""A cluster that speaks TLS: its members notice nothing; who does not, or has no certificate of its authority, gets one
clear error and slows nobody."""

import contextlib
import ctypes
import http.client
import json
import logging
import mmap
import os
import secrets
import socket
import ssl
import subprocess
import threading
import time

import numpy as np
import pytest

from mooncake.client.http import ClientHttpServer
from mooncake.engine import RpcInterface, TransferEngine
from mooncake.errors import StoreError
from mooncake.http_metadata_server import KVBootstrapServer
from mooncake.rpc import frame
from mooncake.rpc.client import Connection
from mooncake.rpc.descriptors import allow_many
from mooncake.rpc.messages import KINDS, PROTOCOL, Hello, Welcome, encode
from mooncake.rpc.porter import Porter
from mooncake.rpc.sockets import connect, set_time_limit
from mooncake.security.anteroom import LIMIT, MOST
from mooncake.store import MooncakeDistributedStore
from tests.processes import BIN, free_port, wait_until
from tests.rest.conftest import RestService
from tests.security.conftest import NAMES
from tests.security.tls_ports import HELLO, asked, is_served, plain_answer, tried
from tests.ssd.conftest import pattern
from tests.ssd.test_together import kinds
from tests.wire import greeted, segments

MIB = 1 << 20
SECRET = "a-secret-of-the-cluster"


PROBE = """
from mooncake.engine import TransferEngine
made = TransferEngine()
assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
result = made.send_probe(session)
"""
SEND = """
from mooncake.engine import RpcInterface
made = RpcInterface()
assert made.initialize_client(2)
result = made.send_data(target, b"hello")
"""
PUBLISH = """
from mooncake.engine import TransferEngine
result = TransferEngine().initialize("127.0.0.1:7713", url, "tcp", "")
"""
ASK = """
import http.client
from mooncake.security.tls import contexts
result = ""
for port in ports:
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=contexts().client)
    try:
        connection.request("GET", "/health")
        result += connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException):
        pass
"""


def tcp_port(address: str) -> int:
    return int(address.rpartition(":")[2])


# ------------------------------------------------------------ members


@pytest.fixture(params=["", SECRET], ids=["open", "secret"])
def secret(request, monkeypatch):
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", request.param)


@pytest.mark.parametrize("force_tcp", ["", "1"], ids=["shm", "tcp"])
def test_members_notice_nothing(encrypted, secret, make_store, make_worker, monkeypatch, force_tcp):
    monkeypatch.setenv("MC_FORCE_TCP", force_tcp)
    owner = make_worker(64 * MIB)
    store = make_store(0)
    values = [secrets.token_bytes(size) for size in (1, 16384, 16385, MIB, 9 * MIB)]
    for i, value in enumerate(values):
        assert store.put(f"k{i}", value) == 0
    assert [store.get(f"k{i}") for i in range(len(values))] == values
    assert owner("result = len(store.get('k4'))") == 9 * MIB
    assert store.transfer_stats()["tcp" if force_tcp else "shm"] >= 20 * MIB


def test_vectors_of_small_and_large_pieces(encrypted, make_store, make_worker, monkeypatch):
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    make_worker(64 * MIB)
    store = make_store(0)
    memory = np.random.default_rng(1).integers(0, 256, 16 * MIB, np.uint8)
    back = np.zeros_like(memory)
    base, target = memory.ctypes.data, back.ctypes.data
    assert store.register_buffer(base, memory.nbytes) == 0
    assert store.register_buffer(target, back.nbytes) == 0
    for unit, keys in ((4096, 8), (700 << 10, 2)):
        count = 7
        starts = [[(k * count + i) * unit for i in range(count)] for k in range(keys)]
        sizes = [[unit] * count] * keys
        names = [f"{unit}-{k}" for k in range(keys)]
        put = store.batch_put_from_multi_buffers(names, [[base + at for at in one] for one in starts], sizes)
        assert list(put) == [0] * keys
        got = store.batch_get_into_multi_buffers(names, [[target + at for at in one] for one in starts], sizes)
        assert all(code > 0 for code in got)
        end = keys * count * unit
        assert (back[:end] == memory[:end]).all()
        back[:] = 0


def test_a_value_in_parts_is_fetched_to_one_disk(encrypted, secret, make_master, make_disk_store, make_disk_worker):
    master, size = make_master("--enable_offload", "--default_kv_lease_ttl=200"), 24 * MIB + 4321
    store = make_disk_store(master, segment=16 * MIB, wait=False)
    make_disk_worker(master, segment=16 * MIB, wait=False)
    for key in ("k0", "k1"):  # each takes more than either segment has
        wait_until(lambda key=key: store.put(key, pattern(key, size)) == 0, 20, "a put")
        wait_until(lambda key=key: "disk" in kinds(store, key), 20, "its copy on disk")
        assert store.get(key) == pattern(key, size)
    wait_until(lambda: kinds(store, "k0") == ["disk"], 10, "its leaving memory")
    assert store.get("k0") == pattern("k0", size)


def engine() -> TransferEngine:
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made


def test_engines(encrypted, monkeypatch, elsewhere):
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    one, other = engine(), engine()
    memory = np.zeros(8 * MIB, np.uint8)
    memory[: 4 * MIB] = np.arange(4 * MIB, dtype=np.uint32).view(np.uint8)[: 4 * MIB]
    assert other.register_memory(memory.ctypes.data, memory.nbytes) == 0
    session = f"127.0.0.1:{other.get_rpc_port()}"
    start = memory.ctypes.data
    assert one.transfer_sync_write(session, start, start + 4 * MIB, 4 * MIB) == 0
    assert (memory[4 * MIB :] == memory[: 4 * MIB]).all()
    memory[: 4 * MIB] = 0
    assert one.transfer_sync_read(session, start, start + 4 * MIB, 4 * MIB) == 0
    assert (memory[4 * MIB :] == memory[: 4 * MIB]).all()
    assert one.send_probe(session) == 0
    for kind in ("plain", "foreign"):
        assert elsewhere(kind, PROBE, session=session) != 0


@pytest.mark.parametrize("write", [True, False])
def test_memory_that_is_not_there_is_an_error_and_no_crash(encrypted, monkeypatch, write):
    """The library that encrypts would touch it itself."""
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    one, other = engine(), engine()
    memory = np.zeros(2 * MIB, np.uint8)
    assert other.register_memory(memory.ctypes.data, memory.nbytes) == 0
    hole = mmap.mmap(-1, 2 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(hole))
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(address, 2 * MIB, 0) == 0
    move = one.transfer_sync_write if write else one.transfer_sync_read
    assert move(f"127.0.0.1:{other.get_rpc_port()}", address, memory.ctypes.data, 2 * MIB) == -1
    assert one.send_probe(f"127.0.0.1:{other.get_rpc_port()}") == 0
    assert libc.mprotect(address, 2 * MIB, 3) == 0


def test_rpc_interface(encrypted, elsewhere):
    server = RpcInterface()
    heard = []
    port = free_port()
    assert server.initialize_server(f"127.0.0.1:{port}", 2)
    server.set_data_receive_callback(lambda data: heard.append(data.get_bytes()))
    assert server.start_server_async()
    payload = secrets.token_bytes(3 * MIB)
    try:
        client = RpcInterface()
        assert client.initialize_client(2)
        for _ in range(3):
            assert client.send_data(f"127.0.0.1:{port}", payload) == 0
        for kind in ("plain", "foreign"):
            assert elsewhere(kind, SEND, target=f"127.0.0.1:{port}") == -1
        assert heard == [payload] * 3
    finally:
        server.stop_server()


def test_a_metadata_service(encrypted, elsewhere):
    server = KVBootstrapServer(0, "127.0.0.1")
    server.run()
    try:
        url = f"127.0.0.1:{server.port}/metadata"
        assert TransferEngine().initialize("127.0.0.1:7711", f"https://{url}", "tcp", "") == 0
        assert TransferEngine().initialize("127.0.0.1:7712", f"http://{url}", "tcp", "") == -1
        assert elsewhere("foreign", PUBLISH, url=f"https://{url}") == -1
    finally:
        server.close()


def test_http_ports(encrypted, master, cleanup, tmp_path, elsewhere):
    status, text = wait_until(lambda: tried(master.metrics_port, "/metrics/summary"))
    assert (status, text[:11]) == (200, b"role=leader")
    probe = ClientHttpServer(0, lambda: True, list)
    cleanup.callback(probe.close)
    assert asked(probe.port, "/health")[0] == 200
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps(settings(master)))
    rest = RestService(["--config", str(file)], **{name: os.environ[name] for name in NAMES})
    cleanup.callback(rest.end)
    wait_until(lambda: tried(rest.port, "/api/exist/x"), 20)
    assert asked(rest.port, "/api/put", "PUT", json.dumps({"key": "k", "value": "v"}).encode())[0] == 200
    assert asked(rest.port, "/api/get/k") == (200, b"v")
    for port in (master.metrics_port, probe.port, rest.port):
        assert plain_answer(port).startswith(b"HTTP/1.1 400"), port
        assert b"this port speaks TLS" in plain_answer(port)
    assert elsewhere("foreign", ASK, ports=[master.metrics_port, probe.port, rest.port]) == ""


def settings(master) -> dict[str, str]:
    where = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "master_server_address": master.address}
    return {**where, "global_segment_size": "64MB", "local_buffer_size": "16MB"}


# ------------------------------------------------------------ who does not go together


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        ("plain", "tls", "this port speaks TLS; set MOONCAKE_TLS_CERT"),
        ("tls", "plain", "the other side does not speak TLS; set MOONCAKE_TLS_CERT"),
        ("foreign", "tls", "certificate is not accepted"),
    ],
)
def test_setup_says_what_is_wrong_at_once(speaks, make_master, caplog, ours, theirs, says):
    speaks(theirs)
    master = make_master()
    speaks(ours)
    store = MooncakeDistributedStore()
    began = time.monotonic()
    with caplog.at_level(logging.ERROR):
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, MIB, "tcp", "", master.address) != 0
    assert time.monotonic() - began < 3
    assert caplog.text.count(says) == 1, caplog.text


def test_a_client_without_a_certificate_gets_nothing(encrypted, master, make_worker, authority):
    """It trusts the authority, and is trusted by nobody."""
    owner = make_worker(16 * MIB)
    assert owner("result = store.put('k', b'v' * 1000)") == 0
    friend = greeted(master.port)
    (info,) = segments(friend, "k")
    friend.close()
    context = ssl.create_default_context(cafile=str(authority.path))
    context.check_hostname = False
    for port in (master.port, tcp_port(info.tcp), master.metrics_port):
        with (
            socket.create_connection(("127.0.0.1", port), 5) as sock,
            contextlib.suppress(ssl.SSLError, ConnectionError),
            context.wrap_socket(sock) as wrapped,
        ):
            wrapped.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert wrapped.recv(100) == b""


def test_who_speaks_plainly_does_not_slip_in(encrypted):
    """Not even where there is no secret, and whatever he begins with."""
    admitted: list[socket.socket] = []
    refused = threading.Semaphore(0)
    porter = Porter(None, lambda: Welcome(PROTOCOL, "test", 0, 0), admitted.append, lambda: refused.release())
    hello = frame.pack(KINDS[Hello], frame.REQUEST, 1, encode(HELLO))
    pairs = []
    try:
        for said in (b"\x00", b"\x15\x03\x03\x00\x02", hello[:20], hello, b"GET / HTTP/1.1\r\n\r\n"):
            ours, theirs = socket.socketpair()
            ours.sendall(said)
            porter.take(theirs)
            pairs.append(ours)
        wait_until(lambda: refused.acquire(blocking=False), 5, "the first is sent away")
        assert b"this port speaks TLS" in pairs[3].recv(4096)
        wait_until(lambda: not porter._visitors, 2 * LIMIT, "all are sent away")
        assert not admitted
    finally:
        porter.stop()
        for one in pairs:
            one.close()


def test_a_refused_certificate_is_named(
    encrypted, master, make_worker, speaks, monkeypatch, foreign, authority, issued
):
    """TLS 1.3 tells a client only after it believes to be through."""
    owner = make_worker(16 * MIB)
    assert owner("result = store.put('k', b'v' * 1000)") == 0
    friend = greeted(master.port)
    (info,) = segments(friend, "k")
    friend.close()
    speaks("foreign")
    both = authority.folder / "both.pem"
    both.write_text(authority.path.read_text() + foreign.path.read_text())
    monkeypatch.setenv("MOONCAKE_TLS_CA", str(both))
    for port in (master.port, tcp_port(info.tcp)):
        connection = Connection(connect("127.0.0.1", port, 2))
        set_time_limit(connection.sock, 3)
        with contextlib.closing(connection), pytest.raises((OSError, StoreError), match=r"certificate|reset|closed"):
            connection.greet(HELLO)


@pytest.mark.parametrize(
    ("check", "hosts", "good"),
    [("1", "DNS:elsewhere", False), ("1", "IP:127.0.0.1", True), ("0", "DNS:elsewhere", True)],
)
def test_names_are_checked_if_asked_for(speaks, make_master, monkeypatch, authority, check, hosts, good):
    name = f"names-{secrets.token_hex(4)}"
    for variable, path in authority.variables(*authority.issue(name, hosts)).items():
        monkeypatch.setenv(variable, path)
    monkeypatch.setenv("MOONCAKE_TLS_CHECK_HOST", check)
    master = make_master()
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", master.address)
    assert (code == 0) == good
    store.close()


# ------------------------------------------------------------ strangers


@pytest.fixture
def ports(encrypted, master, make_worker, cleanup):
    """One of each kind of door."""
    owner = make_worker(16 * MIB)
    assert owner("result = store.put('k', b'v' * 1000)") == 0
    friend = greeted(master.port)
    (info,) = segments(friend, "k")
    friend.close()
    probe = ClientHttpServer(0, lambda: True, list)
    cleanup.callback(probe.close)
    wait_until(lambda: tried(master.metrics_port, "/health"))
    return {"rpc": master.port, "data": tcp_port(info.tcp), "admin": master.metrics_port, "probe": probe.port}


GARBAGE = [
    b"\x16\x03\x01\xff\xff" + b"x" * 70000,  # a record that never ends
    b"\x16\x03\x01\x00\x05hello",
    b"\x16" * 4096,
    b"\x15\x03\x03\x00\x02\x02\x28",
    b"\xff" * 5000,
    b"\x00",
]


def test_garbage_and_silence(ports):
    """Whatever they send, strangers are gone within the limit, and members are served meanwhile."""
    allow_many()
    random = np.random.default_rng(7)
    with contextlib.ExitStack() as stack:
        crowd = []
        for i in range(MOST + 40):
            for kind, port in ports.items():
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
                crowd.append(sock)
                with contextlib.suppress(OSError):
                    if i % 4 == 1:
                        sock.sendall(GARBAGE[i // 4 % len(GARBAGE)])
                    elif i % 4 == 2:
                        sock.sendall(b"\x16\x03\x01" + random.bytes(int(random.integers(1, 600))))
                    elif i % 4 == 3:
                        sock.sendall(b"\x16")
                if i % 90 == 89:
                    began = time.monotonic()
                    assert is_served(kind, port)
                    assert time.monotonic() - began < LIMIT, kind
        end = time.monotonic() + 3 * LIMIT
        for sock in crowd:
            sock.settimeout(max(0.1, end - time.monotonic()))
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass
        assert all(is_served(kind, port) for kind, port in ports.items())


def test_a_proxy_asks_its_users_for_no_certificate(encrypted, cleanup, authority):
    port = free_port()
    flags = [f"--port={port}", "--prefill", "http://127.0.0.1:1", "8998", "--decode", "http://127.0.0.1:1"]
    proxy = subprocess.Popen([BIN / "mooncake_proxy", *flags], stderr=subprocess.DEVNULL)
    cleanup.callback(proxy.wait)
    cleanup.callback(proxy.kill)
    context = ssl.create_default_context(cafile=str(authority.path))

    def status() -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/metrics")
            return connection.getresponse().status
        return 0

    assert wait_until(status, 20) == 200
    assert b"this port speaks TLS" in plain_answer(port)
