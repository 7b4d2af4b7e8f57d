"""The HTTP server beside a store and beside `mooncake_client`."""

import json
import re
import signal
import socket
import subprocess
import threading
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mooncake.client.http import MOST, SILENCE, ClientHttpServer
from mooncake.store import MooncakeDistributedStore
from tests.processes import BIN, free_port, wait_until

MIB = 1 << 20


def ask(port: int, path: str) -> tuple[int, str, str]:
    """(status, content type, text)."""
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def samples(port: int) -> dict[str, float]:
    """Every sample of /metrics: name{label=value} → value, without the label that says which segment, of which values
    are added up."""
    status, kind, text = ask(port, "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)), "a metric is described once"
    assert len(list(text_string_to_metric_families(text))) == len(types), "it is what the format allows"
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r',?segment="[0-9-]+",?', "", name).replace('"', "").replace("{}", "")
            found[name] = found.get(name, 0.0) + float(value)
    return found


@pytest.fixture
def served(master, cleanup):
    """A store with an HTTP server, and its port."""
    store, port = MooncakeDistributedStore(), free_port()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 32 * MIB, 32 * MIB, "tcp", "", master.address)
    assert store.setup(*arguments, enable_client_http_server=True, client_http_port=port) == 0
    cleanup.callback(store.close)
    return store, port


def test_what_is_counted(served, make_worker):
    store, port = served
    assert store.put("a", b"v" * 1000) == store.put("a", b"other") == 0
    assert store.put_batch(["b", "c"], [b"v" * 500] * 2) == 0
    assert len(store.get("a")) == 1000
    assert store.get("none") == b""
    assert [len(value) for value in store.get_batch(["a", "b", "none"])] == [1000, 500, 0]
    assert store.put("large", b"v" * (33 * MIB)) == -600, "that is refused here: nobody was asked"
    assert store.put("large", b"v" * (32 * MIB)) == -200
    found = samples(port)
    expected = {
        "mooncake_transfer_write_bytes": 2000,
        "mooncake_transfer_read_bytes": 2500,
        "mooncake_client_puts_total{result=stored}": 3,
        "mooncake_client_puts_total{result=kept}": 1,
        "mooncake_client_puts_total{result=failed}": 1,
        "mooncake_client_gets_total{result=found}": 3,
        "mooncake_client_gets_total{result=missing}": 2,
        "mooncake_client_gets_total{result=failed}": 0,
        "mooncake_client_errors_total{code=NO_AVAILABLE_HANDLE}": 1,
        "mooncake_client_transferred_bytes_total{transport=local}": 4500,
        "mooncake_client_transferred_bytes_total{transport=tcp}": 0,
        "mooncake_client_read_bytes_total{transport=local}": 2500,
        "mooncake_client_master_reachable": 1,
        "mooncake_transfer_put_latency_count": 3,
        "mooncake_transfer_put_latency_bucket{le=+Inf}": 3,
        "mooncake_transfer_batch_put_latency_count": 1,
        "mooncake_transfer_get_latency_count": 1,
        "mooncake_transfer_batch_get_latency_count": 1,
        "mooncake_client_rpc_count{rpc_name=GetStart}": 3,
        "mooncake_client_rpc_latency_count{rpc_name=GetStart}": 3,
        "mooncake_segment_mounted": 1,
        "mooncake_segment_capacity_bytes": 32 * MIB,
        "mooncake_segment_tcp_read_bytes_total": 0,
        "mooncake_segment_tcp_failures_total": 0,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found["mooncake_transfer_put_latency_sum"] > 0

    other = make_worker(env={"MC_FORCE_TCP": "1"})
    assert other("result = [len(store.get('a')), store.put('theirs', b'v' * 3000)]") == [1000, 0]
    assert store.allocate_and_mount_segment(16 * MIB)["ret"] == 0
    found = samples(port)
    assert found["mooncake_segment_mounted"] == 2
    assert found["mooncake_segment_capacity_bytes"] == 48 * MIB
    assert found["mooncake_segment_tcp_read_bytes_total"] == 1000
    assert found["mooncake_segment_tcp_written_bytes_total"] == 3000
    assert found["mooncake_segment_tcp_read_latency_count"] == found["mooncake_segment_tcp_write_latency_count"] == 1
    assert found["mooncake_segment_tcp_streams"] >= 1

    status, kind, text = ask(port, "/metrics/summary")
    assert (status, kind) == (200, "text/plain; charset=utf-8")
    assert "mooncake_transfer_read_bytes: 2.44 KB\n" in text
    assert 'mooncake_client_errors_total (code="NO_AVAILABLE_HANDLE"): 1\n' in text
    assert "mooncake_transfer_put_latency: count=3, p50<=" in text


def test_values_on_disk_are_counted(make_master, cleanup, tmp_path):
    master, port = make_master("--enable_offload"), free_port()
    store = MooncakeDistributedStore()
    cleanup.callback(store.close)
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, 32 * MIB, "tcp", "", master.address, None, True, str(tmp_path))
    assert store.setup(*arguments, enable_client_http_server=True, client_http_port=port) == 0
    wait_until(lambda: master.metric("mooncake_disk_tiers") == 1, what="the tier")
    for i in range(32):
        wait_until(lambda i=i: store.put(f"k{i}", b"v" * MIB) == 0, what="room")
    assert len(store.get("k0")) == MIB
    assert store.get_offload_rpc_read_count() == 1
    found = samples(port)
    assert found["mooncake_client_disk_reads_total"] == 1
    assert found["mooncake_client_disk_read_bytes_total"] == found["mooncake_transfer_read_bytes"] == MIB
    assert found["mooncake_transfer_write_bytes"] == 32 * MIB
    assert found["mooncake_segment_disk_read_total"] == 1
    assert found["mooncake_segment_disk_used_bytes"] == found["mooncake_segment_disk_written_bytes_total"]
    assert found["mooncake_segment_disk_corrupt_total"] == 0

    assert store.unmount_local_disk_segment() == store.unmount_local_disk_segment() == 0
    assert store.get("k0") == b"", "a miss, now that nobody is told of the disk"
    assert store.batch_is_exist([f"k{i}" for i in range(32)]).count(1) < 16
    assert master.metric("mooncake_disk_tiers") == 0
    assert store.put("new", b"v") == 0
    assert store.get("new") == b"v"


def test_health_and_other_paths(master, served):
    store, port = served
    assert ask(port, "/health") == (200, "application/json", '{"status": "healthy", "code": 0}')
    assert json.loads(ask(port, "/nothing")[2]) == {"error": "not found; try /health, /metrics, /metrics/summary"}
    assert ask(port, "/nothing")[0] == 404
    master.kill()
    assert ask(port, "/health") == (503, "application/json", '{"status": "unhealthy", "code": 2}')
    assert store.get("k") == b""
    found = samples(port)
    assert found["mooncake_client_master_reachable"] == 0
    assert found["mooncake_client_errors_total{code=RPC_FAIL}"] == 1
    wait_until(lambda: samples(port)["mooncake_segment_mounted"] == 0, what="the segment's knowledge of it")
    store.close()
    with socket.create_server(("0.0.0.0", port)):
        pass  # it is free


def test_a_port_in_use(master, caplog):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        store = MooncakeDistributedStore()
        arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", master.address)
        assert store.setup(*arguments, enable_client_http_server=True, client_http_port=port) == -1
        assert f"client_http_port={port} cannot be listened on (Address already in use)" in caplog.text
        assert store.setup(*arguments, enable_client_http_server=True, client_http_port=70_000) == -1
        command = [BIN / "mooncake_client", "--host=127.0.0.1", "--port=0", "--enable_http_server", "--http_port"]
        ended = subprocess.run(
            [*command, str(port), "--global_segment_size=16MB", f"--master_server_address={master.address}"],
            stderr=subprocess.PIPE,
            text=True,
            timeout=20,
        )
    assert ended.returncode == 1
    assert f"--http_port={port} cannot be listened on (Address already in use)" in ended.stderr
    assert not master.get("/get_all_segments").split()


def test_mooncake_client(master, make_worker, cleanup):
    port = free_port()
    command = [BIN / "mooncake_client", "--host=127.0.0.1", f"--port={free_port()}", "--global_segment_size=16MB"]
    process = subprocess.Popen(
        [*command, f"--master_server_address={master.address}", "--enable_http_server", f"--http_port={port}"],
        stderr=subprocess.DEVNULL,
    )
    cleanup.callback(process.wait)
    cleanup.callback(process.kill)
    wait_until(lambda: _is_healthy(port), what="its health")
    worker = make_worker(env={"MC_FORCE_TCP": "1"})
    assert worker("result = [store.put('k', b'v' * 1000), len(store.get('k'))]") == [0, 1000]
    found = samples(port)
    assert found["mooncake_segment_mounted"] == 1
    assert found["mooncake_segment_tcp_read_bytes_total"] == found["mooncake_segment_tcp_written_bytes_total"] == 1000
    assert "mooncake_segment_tcp_read_bytes_total" in ask(port, "/metrics/summary")[2]
    master.kill()
    wait_until(lambda: ask(port, "/health") == (503, "application/json", '{"status": "unhealthy", "code": 2}'))
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0


def _is_healthy(port: int) -> bool:
    try:
        return ask(port, "/health")[0] == 200
    except OSError:
        return False


def test_reports_in_the_log(master, monkeypatch, caplog):
    monkeypatch.setenv("MC_STORE_CLIENT_METRIC_INTERVAL", "1")
    store = MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", master.address)
    with caplog.at_level("INFO", "mooncake.client"):
        assert store.setup(*arguments) == 0
        assert store.get("none") == b""
        wait_until(lambda: 'mooncake_client_gets_total (result="missing"): 1' in caplog.text, what="a report")
        store.close()
        caplog.clear()
        monkeypatch.setenv("MC_STORE_CLIENT_METRIC", "off")
        port = free_port()
        assert store.setup(*arguments, enable_client_http_server=True, client_http_port=port) == 0
        assert store.get("none") == b""
        assert samples(port)["mooncake_client_gets_total{result=missing}"] == 0
        store.close()
        assert "Metrics Summary" not in caplog.text
    for name, word in (
        ("MC_STORE_CLIENT_METRIC", "true or false"),
        ("MC_STORE_CLIENT_METRIC_INTERVAL", "whole number"),
    ):
        monkeypatch.setenv(name, "often")
        caplog.clear()
        assert store.setup(*arguments) == -1
        assert name in caplog.text
        assert word in caplog.text
        monkeypatch.delenv(name)


def test_a_secret(monkeypatch, make_master, cleanup):
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", "a-secret-of-the-cluster")
    store, port = MooncakeDistributedStore(), free_port()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", make_master().address)
    assert store.setup(*arguments, enable_client_http_server=True, client_http_port=port) == 0
    cleanup.callback(store.close)
    assert ask(port, "/health") == (200, "application/json", '{"status": "healthy", "code": 0}')
    missing = "this needs the header Authorization: Bearer, with the secret that MOONCAKE_AUTH_TOKEN sets here"
    for path in ("/metrics", "/metrics/summary", "/nothing"):
        assert ask(port, path) == (401, "application/json", json.dumps({"error": missing}))
    bearer = {"Authorization": "Bearer a-secret-of-the-cluster"}
    with urlopen(Request(f"http://127.0.0.1:{port}/metrics", headers=bearer), timeout=5) as answer:
        assert "mooncake_client_master_reachable 1\n" in answer.read().decode()


def test_a_crowd_takes_no_more_threads_than_there_are_places(cleanup):
    """The longest there go, so that who asks now is answered; then all are gone."""
    server = ClientHttpServer(0, lambda: True, list)
    cleanup.callback(server.close)
    before = threading.active_count()
    crowd = []
    for _ in range(4 * MOST):
        sock = socket.create_connection(("127.0.0.1", server.port), 5)
        cleanup.callback(sock.close)
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        crowd.append(sock)
        assert threading.active_count() - before <= 2 * MOST
    assert ask(server.port, "/health")[0] == 200
    wait_until(lambda: threading.active_count() <= before, 3 * SILENCE, "their threads have ended")
