"""The command: its settings, and how it starts and ends."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.processes import free_port, gone, wait_until
from tests.rest.conftest import COMMAND, RestService, environment


def run(*flags: str, **variables: str) -> subprocess.CompletedProcess:
    """To its end."""
    return subprocess.run([*COMMAND, *flags], env=environment(**variables), capture_output=True, text=True, timeout=30)


def test_settings_from_the_environment_and_from_definitions(master, cleanup):
    service = RestService(
        ["-Dglobal_segment_size=32MB", "-D", "local_buffer_size = 1MB", "--define=local_hostname=127.0.0.1:7777"],
        MOONCAKE_MASTER=master.address,
        MOONCAKE_GLOBAL_SEGMENT_SIZE="16MB",
    )
    cleanup.callback(service.process.wait)
    cleanup.callback(service.process.kill)
    wait_until(service.answers, 20, "the service")
    assert master.metric("master_total_capacity_bytes") == 32 << 20
    assert master.get("/get_all_segments").split() == ["127.0.0.1:7777"]
    assert service.stop() == 0


@pytest.mark.parametrize(
    ("flags", "variables", "status", "words"),
    [
        ([], {}, 1, ["MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER"]),
        (["--config=/no/such.json"], {}, 1, ["/no/such.json", "No such file"]),
        (["-Dnonsense=1"], {"MOONCAKE_MASTER": "m:1"}, 1, ["-D nonsense=1", "local_hostname"]),
        (["-D", "protocol"], {"MOONCAKE_MASTER": "m:1"}, 1, ["-D protocol", "key=value"]),
        (["-Dglobal_segment_size=lots"], {"MOONCAKE_MASTER": "m:1"}, 1, ["global_segment_size", '"lots"']),
        (["--port=x"], {}, 2, ["expected a port"]),
        (["--max-wait-time=-1"], {}, 2, ["expected seconds"]),
        (["--prot=1"], {}, 2, ["--prot", "--port"]),
    ],
)
def test_wrong_settings(flags, variables, status, words):
    ended = run(*flags, **variables)
    assert ended.returncode == status
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("mc_store_rest_server: ")
    assert all(word in ended.stderr for word in words), ended.stderr


def test_a_port_in_use(master):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run(f"--port={port}", "--host=127.0.0.1", MOONCAKE_MASTER=master.address)
    assert ended.returncode == 1
    assert ended.stderr == (f"mc_store_rest_server: Port {port} of 127.0.0.1 is in use: choose another with --port.\n")


def test_without_a_master():
    flags = ["--port=0", "--max-wait-time=1.5", "-Dglobal_segment_size=0"]
    ended = run(*flags, MOONCAKE_MASTER=f"127.0.0.1:{free_port()}")
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("mc_store_rest_server: The pool could not be joined within 1.5 s")
    assert ended.stderr.count("setup failed: the master at") == 2, "it tried again"


@pytest.mark.slow
def test_the_master_may_come_later(make_master, make_service):
    """Until then the port refuses connections, and a signal ends the service at once."""
    master = make_master()
    master.kill()
    service, other = (make_service(master.address, wait=False, global_segment_size=0) for _ in range(2))
    with pytest.raises(ConnectionRefusedError):
        service("GET", "/api/exist/k")
    wait_until(lambda: _handles(other.process.pid, signal.SIGTERM), what="its start")
    assert other.stop() == 0
    master.start()
    wait_until(service.answers, 20, "the service")
    assert service.stop() == 0


def _handles(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status") as f:
        caught = next(line for line in f if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_secret(monkeypatch, make_master, make_service):
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", "a-secret-of-the-cluster")
    service = make_service(make_master().address, wait=False, global_segment_size=0, token="a-secret-of-the-cluster")
    missing = "this needs the header Authorization: Bearer, with the secret that MOONCAKE_AUTH_TOKEN sets here"
    wait_until(lambda: service.answers(401), 20, "the service")
    assert service("GET", "/api/exist/k") == (401, "application/json", {"error": missing})
    assert service("GET", "/nothing", headers={"Authorization": "Bearer another"})[0] == 401
    bearer = {"Authorization": "Bearer a-secret-of-the-cluster"}
    assert service("GET", "/api/exist/k", headers=bearer) == (200, "application/json", {"exists": False})


@pytest.mark.slow
def test_its_segment_ends_with_a_service_that_is_killed(master, service):
    service.process.kill()
    service.process.wait()
    wait_until(lambda: master.metric("master_total_capacity_bytes") == 0, 15, "the end of its segment")
    assert gone(service.process.pid)


def test_the_names_of_the_drop_in():
    from mooncake.mooncake_store_service import sync_main

    assert callable(sync_main)
    import tomllib

    with open(os.path.join(os.path.dirname(__file__), "..", "..", "pyproject.toml"), "rb") as f:
        scripts = tomllib.load(f)["project"]["scripts"]
    assert scripts["mc_store_rest_server"] == "mooncake.mooncake_store_service:sync_main"


def test_help_and_version():
    assert "--max-wait-time" in run("--help").stdout
    assert run("--version").stdout.startswith("mc_store_rest_server version ")
    program = "import sys, mooncake.mooncake_store_service; print([x in sys.modules for x in ('numpy', 'aiohttp')])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert loaded == "[False, False]\n", "it starts fast"
