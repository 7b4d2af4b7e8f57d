"""Every answer of the HTTP metadata server, alone and inside the master, over real sockets; and its limits."""

import http.client
import os
import signal
import socket
import subprocess
import time
from urllib.parse import quote

import pytest

from mooncake.http_metadata_server import KVBootstrapServer
from mooncake.metadata.table import MetadataTable, TableFullError
from tests.processes import BIN, Master, Worker, children, free_port, wait_until

COMMAND = str(BIN / "mooncake_http_metadata_server")
HOST = "127.0.0.1"
ADDRESS_KEY = "mooncake/rpc_meta/node:1"


class Server:
    """What to ask, and how it differs from the other."""

    def __init__(self, port: int, standalone: bool) -> None:
        self.port, self.standalone = port, standalone

    def ask(self, method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None):
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request(method, target, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers
        finally:
            connection.close()

    def __call__(self, method: str, key: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        status, content, _ = self.ask(method, f"/metadata?key={quote(key, safe='')}", body, names)
        return status, content.decode()

    def tag(self, key: str) -> str:
        return self.ask("GET", f"/metadata?key={quote(key)}")[2]["ETag"]


@pytest.fixture(params=["alone", "in the master"])
def server(request, cleanup):
    if request.param == "alone":
        alone = KVBootstrapServer(0, HOST)
        assert not alone.poll()
        alone.run()
        cleanup.callback(alone.close)
        assert alone.poll()
        return Server(alone.port, True)
    port = free_port()
    master = Master("--enable_http_metadata_server", f"--http_metadata_server_port={port}",
                    f"--http_metadata_server_host={HOST}")  # fmt: skip
    cleanup.callback(master.stop)
    return Server(port, False)


def test_answers(server):
    missing = (404, "metadata not found")
    assert server("GET", "a") == missing
    assert server("DELETE", "a") == missing
    assert server("PUT", "a", b'{"x": 1}') == (200, "metadata updated")
    assert server("GET", "a") == (200, '{"x": 1}')
    assert server("PUT", "a", b"anything else") == (200, "metadata updated")
    assert server("GET", "a") == (200, "anything else")
    assert server("DELETE", "a") == (200, "metadata deleted")
    assert server("GET", "a") == missing
    wanted = "metadata key is required" if server.standalone else "Missing key parameter"
    for target in ("/metadata", "/metadata?key=", "/metadata?other=1"):
        for method in ("GET", "PUT", "DELETE"):
            assert server.ask(method, target)[:2] == (400, wanted.encode())
    assert server.ask("POST", "/metadata?key=a")[0] == 405
    assert server.ask("GET", "/elsewhere")[0] == 404
    assert server.ask("GET", "/health")[:2] == (200, b"OK")


def test_an_address_is_not_overwritten(server):
    assert server("PUT", ADDRESS_KEY, b"1")[0] == 200
    assert server("PUT", ADDRESS_KEY, b"2")[0] == 400
    assert server("PUT", ADDRESS_KEY, b"1") == ((400, server("PUT", ADDRESS_KEY, b"2")[1]) if server.standalone
                                                else (200, "metadata unchanged"))  # fmt: skip
    assert server("GET", ADDRESS_KEY) == (200, "1")
    assert server("DELETE", ADDRESS_KEY)[0] == 200
    assert server("PUT", ADDRESS_KEY, b"2") == (200, "metadata updated")


def test_keys_are_what_the_client_means(server):
    """Encoded or not, it is the same key."""
    assert server.ask("PUT", "/metadata?key=mooncake/ram/node:1", b"1")[0] == 200
    assert server("GET", "mooncake/ram/node:1") == (200, "1")
    assert server("PUT", "a b&c=d/ü%2f", b"2")[0] == 200
    assert server("GET", "a b&c=d/ü%2f") == (200, "2")
    assert server("GET", "a b&c=d/ü/") == (404, "metadata not found")


def test_conditions(server):
    assert server("PUT", ADDRESS_KEY, b"1", If_Match='"x"')[0] == 412
    assert server("PUT", ADDRESS_KEY, b"1")[0] == 200
    first = server.tag(ADDRESS_KEY)
    assert server("PUT", ADDRESS_KEY, b"2", If_Match='"x"')[0] == 412
    assert server("PUT", ADDRESS_KEY, b"2", If_Match=first)[0] == 200
    assert server("DELETE", ADDRESS_KEY, If_Match=first)[0] == 412
    assert server("GET", ADDRESS_KEY) == (200, "2")
    assert server("DELETE", ADDRESS_KEY, If_Match=server.tag(ADDRESS_KEY))[0] == 200


def test_time_to_live(server):
    for text in ("0", "-1", "1.5", "soon", ""):
        assert server("PUT", "a", b"1", Mooncake_TTL=text)[0] == 400
    assert server("PUT", "a", b"1", Mooncake_TTL="1")[0] == 200
    assert server("PUT", "b", b"1")[0] == 200
    assert server("GET", "a")[0] == 200
    wait_until(lambda: server("GET", "a")[0] == 404, 5)
    assert server("GET", "b")[0] == 200


def test_limits_of_a_request(server):
    assert server("PUT", "a", b"x" * (1 << 20))[0] == 200
    assert server("PUT", "a", b"x" * ((1 << 20) + 1))[0] == 413
    assert server("GET", "a")[1] == "x" * (1 << 20)
    assert server("PUT", "k" * 4096, b"1")[0] == 200
    assert server("PUT", "k" * 4097, b"1")[0] == 400
    assert server("PUT", "k" * 100_000, b"1")[0] == 400


def test_garbage_on_the_port(server):
    for data in (
        b"\x00" * 1000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"PUT /metadata?key=x HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ):
        with socket.create_connection((HOST, server.port), timeout=5) as stream:
            stream.sendall(data)
            stream.settimeout(2)
            stream.recv(1000)
    assert server.ask("GET", "/health")[0] == 200


class TestTable:
    def test_number_and_size_are_bounded(self):
        table = MetadataTable(lambda: 0.0, entries=3, size=100)
        for key in "abc":
            table.put(key, b"x" * 10)
        with pytest.raises(TableFullError, match="3 entries"):
            table.put("d", b"")
        table.put("a", b"y" * 50)  # one that is there may change
        with pytest.raises(TableFullError):
            table.put("a", b"y" * 90)
        assert table.get("a") == b"y" * 50
        assert table.remove("a")
        assert not table.remove("a")
        assert (len(table), table.size) == (2, 22)
        table.put("d", b"x" * 77)
        with pytest.raises(TableFullError):
            table.put("b", b"x" * 12)

    def test_ends(self):
        now = [0.0]
        table = MetadataTable(lambda: now[0])
        for i in range(2500):
            table.put(f"m/ram/{i}", b"x", 10 if i % 2 else 20)
        now[0] = 15
        steps = list(table.sweep({"0", "2"}))
        assert len(steps) == 3
        assert len(table) == 1248
        assert table.get("m/ram/4") == b"x"
        now[0] = 20
        assert table.get("m/ram/4") is None
        list(table.sweep(set()))
        assert (len(table), table.size) == (0, 0)


# -- the commands


def test_command_starts_and_stops():
    port = free_port()
    process = subprocess.Popen([COMMAND, "--port", str(port), "--host", HOST], stderr=subprocess.PIPE, text=True)
    try:
        assert f"http://{HOST}:{port}/metadata" in process.stderr.readline()
        assert Server(port, True)("PUT", "a", b"1")[0] == 200
        run = subprocess.run([COMMAND, "--port", str(port), "--host", HOST], capture_output=True, text=True, timeout=20)
        assert run.returncode == 1
        assert run.stderr == (
            f"mooncake_http_metadata_server: Port {port} of {HOST} is in use: choose another with --port.\n"
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "arguments", [["--port", "many"], ["--port", "70000"], ["--host", "no host"], ["--log-level", "x"], ["--p", "1"]]
)
def test_wrong_arguments(arguments):
    run = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=20, check=False)
    assert run.returncode in (1, 2)
    assert "Traceback" not in run.stderr
    assert arguments[0] in run.stderr


def test_log_lines_and_a_port_in_use(tmp_path, cleanup):
    port = free_port()
    flags = ["--enable_http_metadata_server=true", f"--http_metadata_server_port={port}",
             f"--http_metadata_server_host={HOST}"]  # fmt: skip
    master = Master(*flags, log=tmp_path / "log")
    cleanup.callback(master.stop)
    assert Server(port, False).ask("GET", "/health")[0] == 200  # waits in the backlog until it is answered
    wait_until(lambda: "C++ HTTP metadata server started successfully" in (tmp_path / "log").read_text())
    assert f"HTTP metadata server started on port {port}" in (tmp_path / "log").read_text()
    run = subprocess.run(
        [BIN / "mooncake_master", "--port=0", "--metrics_port=0", *flags], capture_output=True, text=True, timeout=20
    )
    assert run.returncode == 1
    assert f"Port {port} of {HOST} is in use" in run.stderr
    assert "--http_metadata_server_port" in run.stderr


@pytest.mark.parametrize("asked", [True, False])
def test_entries_of_a_lost_client(asked, cleanup):
    """--enable_metadata_cleanup_on_timeout: what its segment left goes with it."""
    port = free_port()
    master = Master(
        "--enable_http_metadata_server",
        f"--http_metadata_server_port={port}",
        f"--http_metadata_server_host={HOST}",
        f"--enable_metadata_cleanup_on_timeout={str(asked).lower()}",
    )
    cleanup.callback(master.stop)
    server = Server(port, False)
    worker = Worker()
    cleanup.callback(worker.close)
    code = """
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
result = [store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 20, 0, "tcp", "", master), store.get_hostname()]
"""
    result, name = worker(code, master=master.address)
    assert result == 0
    keys = [f"mooncake/ram/{name}", f"mooncake/blue/rpc_meta/{name}", f"mooncake/ram/{name}0"]
    for key in keys:
        assert server("PUT", key, b"1")[0] == 200
    (segment_server,) = children(worker.pid)
    os.kill(segment_server, signal.SIGKILL)  # else it would say goodbye for both
    worker.kill()
    wait_until(lambda: not master.get("/get_all_segments").split(), 15)
    if asked:
        wait_until(lambda: [server("GET", key)[0] for key in keys] == [404, 404, 200], 8)
    else:
        time.sleep(0.5)
        assert [server("GET", key)[0] for key in keys] == [200, 200, 200]
