"""`mooncake up`, as a user runs it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import free_port, gone, wait_until

MIB = 1 << 20


def test_the_printed_lines_work(up):
    pool = up()
    lines = pool.text.split("Python:\n")[1].split("\n\n")[0]
    program = "\n".join(line.strip() for line in lines.splitlines()) + "\nstore.close()"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert answer.stdout == "b'hello'\n"
    assert pool.metric("master_key_count") == 1, "a value outlives the store that put it"
    assert pool.metric("master_total_capacity_bytes") == 64 * MIB

    config = json.loads(pool.config.read_text())
    assert config["master_server_address"] == f"127.0.0.1:{pool.port}"
    assert (config["mode"], config["global_segment_size"]) == ("standalone-store", 0)
    command = shlex.split(pool.group(r"(vllm serve .*)"))
    flags = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert flags["kv_load_failure_policy"] == "recompute"
    assert flags["kv_connector_extra_config"]["lookup_async"] is True
    assert flags["kv_connector_extra_config"]["lookup_rpc_port"] > 0


def test_the_lines_of_prefill_and_decode_instances(up):
    lines = [line.split() for line in up("--prefill", "2", "--decode", "1").text.splitlines()]
    assert ["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=60" in line for line in lines if line[:1] == ["export"]] == [True]
    engines = [line for line in lines if "serve" in line]
    (proxy,) = [line for line in lines if line[:1] == ["mooncake_proxy"]]
    behind = ["mooncake_proxy", "--port", proxy[2]]
    lookups = set()
    for engine, role in zip(engines, ("kv_producer", "kv_producer", "kv_consumer"), strict=True):
        url = f"http://127.0.0.1:{engine[engine.index('--port') + 1]}"
        if role == "kv_producer":
            behind += ["--prefill", url, engine[0].removeprefix("VLLM_MOONCAKE_BOOTSTRAP_PORT=")]
        else:
            behind += ["--decode", url]
        flags = json.loads(engine[-1].strip("'"))
        assert (flags["kv_connector"], flags["kv_role"]) == ("MultiConnector", role)
        assert flags["kv_load_failure_policy"] == "recompute"
        straight, store = flags["kv_connector_extra_config"]["connectors"]
        assert (straight["kv_connector_module_path"], straight["kv_role"]) == ("mooncake.vllm", role)
        assert store["kv_role"] == role.replace("kv_producer", "kv_both")
        lookups.add(store["kv_connector_extra_config"]["lookup_rpc_port"])
    assert proxy == behind
    assert len(lookups) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stops_cleanly(up, number):
    pool = up()
    start = time.monotonic()
    assert pool.end(number) == (0, "")
    assert time.monotonic() - start < 3
    pool.left_nothing()


def test_ctrl_c_in_a_terminal_reaches_the_whole_group(up):
    """A terminal signals every process of the foreground group at once."""
    pool = up()
    groups = {os.getpgid(pid) for pid in pool.servers.values()}
    assert os.getpgid(pool.process.pid) not in groups


def test_says_which_server_died(up):
    pool = up()
    os.kill(pool.servers["client"], signal.SIGKILL)
    code, messages = pool.end()
    assert code == 1
    assert messages.startswith("mooncake: the segment server was ended by SIGKILL")
    pool.left_nothing()


def test_its_servers_die_with_it(up):
    pool = up()
    pool.end(signal.SIGKILL)
    wait_until(lambda: all(map(gone, pool.servers.values())), 5, "the end of both servers")
    wait_until(lambda: not pool.config.parent.exists(), 5, "the end of its folder")


def test_uses_the_ports_it_is_given(up):
    port, metrics_port = free_port(), free_port()
    pool = up("--port", str(port), "--metrics-port", str(metrics_port))
    assert (pool.port, pool.metrics_port) == (port, metrics_port)

    code, messages = up("--port", str(port)).end()
    assert code == 1
    assert messages == (f"mooncake: --port: another program listens on port {port} of 127.0.0.1; choose another one.\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "a lot"), "--size: expected a size in bytes"),
        (("--size", "1MB"), "--size must be at least 16MB"),
        (("--size", "900TB"), "--size is 900TB, but this host has only"),
        (("--port", "70000"), "--port must be a port number"),
        (("--port", "23456", "--metrics-port", "23456"), "--port and --metrics-port are both 23456"),
    ],
)
def test_wrong_settings_get_a_sentence(up, arguments, message):
    code, messages = up(*arguments).end()
    assert code == 1
    assert messages.startswith(f"mooncake: {message}")
    assert messages.count("\n") == 1
