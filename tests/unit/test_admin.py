"""Every route of the master's HTTP server, over a real master in this process and real sockets."""

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from mooncake.master.admin import AdminServer
from mooncake.master.config import MasterConfig
from mooncake.master.counters import Counters
from mooncake.master.service import MasterService, serve
from mooncake.rpc.client import Connection
from mooncake.rpc.messages import (
    PROTOCOL,
    GetStart,
    Grant,
    Hello,
    Mount,
    PutEnd,
    PutStart,
    PutStarted,
    SegmentInfo,
)
from mooncake.rpc.sockets import connect, set_time_limit
from mooncake.version import __version__

SEGMENT = 4711
SEGMENT_SIZE = 16 << 20
NAME = "127.0.0.1:12345"


class Running:
    """A master with its admin server, in a loop of a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.admin_port = self.listening.getsockname()[1]
        self.connections: list[Connection] = []
        self._do(self._start())

    def _do(self, coroutine) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    async def _start(self) -> None:
        config = MasterConfig(rpc_address="127.0.0.1", rpc_port=0, lease_ms=60_000)
        self.service: MasterService = await serve(config, Counters())
        self.admin = AdminServer(self.service)
        await self.admin.start(self.listening)

    async def _stop(self) -> None:
        await self.admin.stop()
        await self.service.close()

    def stop(self) -> None:
        for connection in self.connections:
            connection.close()
        self._do(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def connect(self, role: str) -> Connection:
        connection = Connection(connect("127.0.0.1", self.service.port, 1))
        set_time_limit(connection.sock, 5)
        self.connections.append(connection)
        connection.greet(Hello(PROTOCOL, __version__, role, "1-2", "host"))
        return connection

    def mount(self) -> None:
        """A segment whose server only says that it is there."""
        info = SegmentInfo(SEGMENT, NAME, SEGMENT_SIZE, "127.0.0.1:9", "@unused", "host", "1-2")
        self.connect("segment").call(Mount(info, 0))

    def put(self, sizes: dict[str, int]) -> None:
        client = self.connect("client")
        started = client.call(PutStart(list(sizes), list(sizes.values())))
        assert isinstance(started, PutStarted)
        grants = [grant for grant in started.grants if isinstance(grant, Grant)]
        assert len(grants) == len(sizes), started.grants
        client.call(PutEnd([grant.seq for grant in grants]))


@pytest.fixture(scope="module")
def master() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def pool(master: Running) -> Running:
    """The same master, with a segment and two objects, one of which is leased."""
    master.mount()
    master.put({"a": 1000, "b/ü": 70_000})
    master.connect("client").call(GetStart(["a"]))
    return master


class Answer(NamedTuple):
    status: int
    kind: str
    text: str


def ask(running: Running, path: str, method: str = "GET", body: bytes | None = None) -> Answer:
    request = urllib.request.Request(f"http://127.0.0.1:{running.admin_port}{path}", data=body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return Answer(answer.status, answer.headers["Content-Type"], answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.headers["Content-Type"], error.read().decode())


NOT_FOUND = {"success": False, "error_code": -704, "error_message": "OBJECT_NOT_FOUND"}
NO_KEY = {
    "ok": False,
    "error": "OBJECT_NOT_FOUND",
    "values": None,
    "disk_values": None,
    "local_disk_values": None,
    "nof_values": None,
}


# The empty master comes first: `pool` adds to the same one.


def test_empty_listings(master: Running) -> None:
    for path in ("/get_all_keys", "/get_all_segments"):
        answer = ask(master, path)
        assert (answer.status, answer.text) == (200, "")
    assert json.loads(ask(master, "/get_segments_detail").text) == {"total_segments": 0, "segments": []}


def test_fixed_answers(master: Running) -> None:
    assert json.loads(ask(master, "/health").text) == {
        "status": "ok",
        "role": "leader",
        "ha_state": "serving",
        "service_ready": True,
        "leader_address": None,
        "view_version": None,
    }
    assert ask(master, "/health").kind == "application/json; charset=utf-8"
    assert ask(master, "/role").text == "leader"
    assert ask(master, "/ha_status").text == "serving"
    assert json.loads(ask(master, "/leader").text) == {"present": False, "leader_address": None, "view_version": None}
    assert json.loads(ask(master, "/kv_events/status").text) == {
        "enabled": False,
        "published_batches": 0,
        "published_events": 0,
        "dropped_events": 0,
        "skipped_unparsed_keys": 0,
    }


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/api/v1/tenant_quotas", 409, -1011),
        ("PUT", "/api/v1/tenant_quotas?tenant_id=a", 409, -1011),
        ("DELETE", "/api/v1/tenant_quotas?tenant_id=a", 409, -1011),
        ("POST", "/api/v1/drain_jobs", 400, -600),
        ("GET", "/api/v1/drain_jobs/query", 400, -600),
        ("GET", "/api/v1/drain_jobs/query?job_id=1", 400, -600),
        ("GET", "/api/v1/drain_jobs/query?job_id=1-2", 404, -1402),
        ("POST", "/api/v1/drain_jobs/cancel?job_id=1-2", 404, -1402),
        ("GET", "/query_key?key=absent", 404, -704),
        ("GET", "/query_key", 404, -704),
        ("GET", "/api/v1/segments/status", 400, -600),
        ("GET", "/api/v1/segments/status?segment=absent", 404, -101),
        ("POST", "/api/v1/remove_all?force=perhaps", 400, -600),
    ],
)
def test_json_errors(master: Running, method: str, path: str, status: int, code: int) -> None:
    answer = ask(master, path, method, b"{}" if method in ("POST", "PUT") else None)
    assert answer.status == status
    content = json.loads(answer.text)
    assert (content["success"], content["error_code"]) == (False, code)
    assert content["error_message"]


def test_other_errors(master: Running) -> None:
    assert ask(master, "/batch_query_keys").status == 400
    assert json.loads(ask(master, "/batch_query_keys").text)["success"] is False
    answer = ask(master, "/query_segment?segment=absent")
    assert (answer.status, answer.text) == (500, "Failed to query segment")
    assert ask(master, "/nothing").status == 404
    assert ask(master, "/api/v1/remove_all").status == 405


def test_keys(pool: Running) -> None:
    assert sorted(ask(pool, "/get_all_keys").text.splitlines()) == ["a", "b/ü"]
    assert ask(pool, "/get_all_keys").text.endswith("\n")


def test_query_key(pool: Running) -> None:
    content = json.loads(ask(pool, "/query_key?key=a").text)
    (value,) = content.pop("data")
    assert content == {"success": True}
    assert value["size_"] == 1000
    assert value["protocol_"] == "tcp"
    assert value["transport_endpoint_"] == "127.0.0.1:9"
    assert 0 <= value["buffer_address_"] < SEGMENT_SIZE


def test_batch_query_keys(pool: Running) -> None:
    data = json.loads(ask(pool, "/batch_query_keys?keys=a,absent,b%2F%C3%BC").text)["data"]
    assert list(data) == ["a", "absent", "b/ü"]
    assert data["absent"] == NO_KEY
    assert data["a"]["ok"] is True
    assert data["a"]["error"] is None
    assert data["b/ü"]["values"][0]["size_"] == 70_000


def test_segments(pool: Running) -> None:
    assert ask(pool, "/get_all_segments").text == f"{NAME}\n"
    content = json.loads(ask(pool, "/get_segments_detail").text)
    assert content["total_segments"] == 1
    (segment,) = content["segments"]
    assert segment["segment_name"] == NAME
    assert segment["client_id"] == "1-2"
    assert segment["size_bytes"] == segment["allocator_capacity_bytes"] == SEGMENT_SIZE
    assert segment["size_human"] == "0.015625 GiB"
    assert segment["allocator_used_bytes"] >= 71_000
    assert segment["status"] == "OK"
    used = segment["allocator_used_bytes"]
    text = ask(pool, f"/query_segment?segment={NAME}").text
    assert text == f"{NAME}\nUsed(bytes): {used}\nCapacity(bytes) : {SEGMENT_SIZE}\n"
    assert json.loads(ask(pool, f"/api/v1/segments/status?segment={NAME}").text) == {
        "success": True,
        "segment": NAME,
        "status": 1,
        "status_name": "OK",
        "error_code": 0,
        "error_message": "",
    }


def test_metrics(pool: Running) -> None:
    answer = ask(pool, "/metrics")
    assert answer.kind == "text/plain; version=0.0.4"
    lines = answer.text.splitlines()
    for line in (
        "master_key_count 2",
        f'segment_total_capacity_bytes{{segment="{NAME}"}} {SEGMENT_SIZE}',
        "master_put_start_requests_total 0",
        "master_batch_put_start_requests_total 1",
        "master_batch_put_start_items_total 2",
        'master_value_size_bytes_bucket{le="4096.000000"} 1',
        "master_value_size_bytes_sum 71000",
    ):
        assert line in lines


def test_summary(pool: Running) -> None:
    text = ask(pool, "/metrics/summary").text
    assert text.startswith("role=leader, state=serving, service_ready=true, master={Mem Storage: ")
    assert " / 16.00 MB (" in text
    assert "| Keys: 2 (soft-pinned: 0) | Clients: " in text
    assert "PutStart=0.00/0.00" in text
    assert "\n" not in text


def test_many_keys(pool: Running) -> None:
    """Several slices, and a request line longer than HTTP servers usually take."""
    keys = [f"many/{number:040d}" for number in range(5000)]
    pool.put(dict.fromkeys(keys, 1))
    assert sorted(ask(pool, "/get_all_keys").text.splitlines()) == ["a", "b/ü", *keys]
    data = json.loads(ask(pool, f"/batch_query_keys?keys={','.join(keys)}").text)["data"]
    assert all(data[key]["ok"] for key in keys)


def test_remove_all(pool: Running) -> None:
    """Comes last: it empties the pool."""
    assert json.loads(ask(pool, "/api/v1/remove_all", "POST").text) == {"success": True, "removed_count": 5001}
    assert ask(pool, "/get_all_keys").text == "a\n"
    assert json.loads(ask(pool, "/api/v1/remove_all?force=true", "POST").text)["removed_count"] == 1
    assert ask(pool, "/get_all_keys").text == ""
