"""Fixtures: `mc_store_rest_server` processes, and requests to them."""

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import Master, free_port, wait_until

COMMAND = [sys.executable, "-m", "mooncake.mooncake_store_service"]


def environment(**variables: str) -> dict[str, str]:
    """Without settings of the pool that the tests themselves were started with."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("MOONCAKE_")}, **variables}


class RestService:
    """One on a free port; `port` 0 until it answers."""

    def __init__(self, flags: list[str], **variables: str) -> None:
        self.port = free_port()
        self.process = subprocess.Popen(
            [*COMMAND, f"--port={self.port}", "--host=127.0.0.1", *flags],
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __call__(self, method: str, path: str, body=None, raw: bytes | None = None, headers=None):
        """(status, content type, body: parsed if it is JSON)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            data = raw if raw is not None else None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            content, kind = answer.read(), answer.headers.get_content_type()
            return answer.status, kind, json.loads(content) if kind == "application/json" else content
        finally:
            connection.close()

    def answers(self, status: int = 200) -> bool:
        assert self.process.poll() is None, "the service ended at once"
        try:
            return self("GET", "/api/exist/x")[0] == status
        except OSError:
            return False

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(10)
        finally:
            self.process.kill()


def start_service(directory: Path, master_address: str, *flags: str, token: str = "", **settings) -> RestService:
    """With a configuration file in `directory`; it may not answer yet."""
    file = directory / f"mooncake-{free_port()}.json"
    content = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master_address,
        "global_segment_size": "64MB",
        "local_buffer_size": "64MB",
        **settings,
    }
    file.write_text(json.dumps(content))
    return RestService(["--config", str(file), *flags], MOONCAKE_AUTH_TOKEN=token)


@pytest.fixture
def make_service(cleanup, tmp_path):
    def make(master_address: str, *flags: str, wait: bool = True, **settings) -> RestService:
        service = start_service(tmp_path, master_address, *flags, **settings)
        cleanup.callback(service.end)
        if wait:
            wait_until(service.answers, 20, "the service")
        return service

    return make


@pytest.fixture
def service(master, make_service):
    return make_service(master.address)


class Pool:
    """A master, a service that contributes 64 MiB to it, and of another pool a master and a service that contribute
    nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.master, self.bare_master = Master(), Master()
        self.service = start_service(directory, self.master.address)
        flags = "--segment-dir", str(directory)
        self.bare_service = start_service(directory, self.bare_master.address, *flags, global_segment_size=0)

    def close(self) -> None:
        for part in (self.service.end, self.bare_service.end, self.master.stop, self.bare_master.stop):
            part()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Of all tests of a module, which use keys of their own and leave no segments."""
    made = Pool(tmp_path_factory.mktemp("rest"))
    try:
        wait_until(lambda: made.service.answers() and made.bare_service.answers(), 20, "the services")
        yield made
    finally:
        made.close()


@pytest.fixture
def shared_memory():
    """A file of 64 MiB in /dev/shm: its name."""
    name = f"mooncake-test-{os.getpid()}-{free_port()}"
    path = f"/dev/shm/{name}"
    with open(path, "wb") as f:
        f.truncate(64 << 20)
    yield name
    os.unlink(path)
