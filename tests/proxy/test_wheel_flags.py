"""The proxy by the name and the flags that it has in the C++ wheel."""

import signal
import subprocess
import sys

import pytest

from tests.processes import free_port, wait_until
from tests.proxy.processes import assert_whole, greedy, http, streamed

COMMAND = [sys.executable, "-m", "mooncake.vllm_v1_proxy_server"]


def answers(url: str) -> bool:
    try:
        status = http(url + "/status")[2]
    except OSError:
        return False
    return all(one["state"] == "ready" for one in status["prefill"] + status["decode"])


def test_prefill_first_then_decode_in_turns(make_engine, cleanup):
    prefill, *decode = make_engine(returned_params=True), make_engine(), make_engine()
    port = free_port()
    flags = ["--port", port, "--prefiller-hosts", "127.0.0.1", "--prefiller-ports", prefill.port]
    flags += ["--decoder-hosts", "127.0.0.1", "127.0.0.1", "--decoder-ports", *(engine.port for engine in decode)]
    process = subprocess.Popen([*COMMAND, *map(str, flags)], stderr=subprocess.DEVNULL)
    cleanup.callback(process.wait)
    cleanup.callback(process.kill)
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: answers(url), what="the proxy")
    assert http(url + "/healthcheck")[0] == 200
    for _ in range(2):
        assert_whole(streamed(url, greedy(8)), greedy(8))
    for first, engine in zip(prefill.bodies(), decode, strict=True):
        (second,) = engine.bodies()
        assert first["kv_transfer_params"]["do_remote_decode"] is True
        assert (first["stream"], first["max_tokens"]) == (False, 1)
        assert second["kv_transfer_params"]["do_remote_prefill"] is True
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--decoder-hosts", "a", "b", "--decoder-ports", "1", "2", "3"], 1, "--decoder-hosts names 2"),
        (["--prefiller-ports", "many"], 2, '"many"'),
        (["--prefil-ports", "1"], 2, "--prefiller-ports"),
        (["--prefiller-ports", "1", "1"], 1, "given twice"),
    ],
)
def test_mistakes(flags, status, words):
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr
