"""docs/high_availability.md says what is so."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake.election import addresses, base, kubernetes
from mooncake.master.flag_table import BY_NAME
from tests.engine.services import Redis, server
from tests.processes import BIN, free_port, wait_until
from tests.proxy.processes import http

PAGE = (Path(__file__).parents[2] / "docs" / "high_availability.md").read_text()
PORTS = ("6379", "50051", "50061", "9003", "9013")


@pytest.mark.slow
def test_the_commands_run(cleanup):
    """With other ports; who is to kill the leader kills it."""
    if not server("redis-server"):
        pytest.skip("there is no redis-server here")
    ports = {port: str(free_port()) for port in PORTS}

    def moved(text: str) -> str:
        return re.sub("|".join(PORTS), lambda found: ports[found[0]], text)

    lines = [moved(line.strip()) for line in PAGE.splitlines() if line.startswith("    ")]
    started = [line.removesuffix(" &") for line in lines if line.endswith(" &")]
    assert [line.split()[0] for line in started] == [
        "redis-server",
        "mooncake_master",
        "mooncake_master",
        "mooncake_client",
    ]
    environment = {**os.environ, **Redis.environment(None)}
    processes = []
    for line in started:
        argv = shlex.split(line)
        if argv[0] == "mooncake_client":
            wait_until(lambda: roles(ports), what="the masters")
            argv.append(f"--port={free_port()}")
        argv[0] = server(argv[0]) if argv[0] == "redis-server" else str(BIN / argv[0])
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(argv, env=environment, **quiet)
        cleanup.callback(process.wait, 10)
        cleanup.callback(process.terminate)
        processes.append(process)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    client = subprocess.Popen(
        [sys.executable, "-c", moved(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    cleanup.callback(client.kill)
    assert client.stdout.read(4) == "kill"
    leader = roles(ports).index("leader")
    processes[1 + leader].kill()
    client.communicate("\n", timeout=20)
    assert client.returncode == 0


def roles(ports) -> list[str]:
    """Of the two masters; empty while one does not answer or nobody leads."""
    try:
        found = [http(f"http://127.0.0.1:{ports[port]}/health")[2]["role"] for port in ("9003", "9013")]
    except OSError:
        return []
    return found if "leader" in found else []


def test_what_is_named_exists():
    others = {"master", "host", "master_server_address", "global_segment_size", "port", "save", "retry", "policy"}
    for flag in set(re.findall(r"--(\w+)", PAGE)) - others:
        assert flag in BY_NAME, flag
    for variable in (addresses.CLUSTER, kubernetes.SERVER, kubernetes.CREDENTIALS):
        assert f"`{variable}`" in PAGE
    assert f"{base.LEASE_S:g} s" in PAGE
    assert f"cannot renew for {base.LEASE_S - base.MARGIN_S:g} s" in PAGE
