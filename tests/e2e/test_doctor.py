"""`mooncake doctor` on real vLLM instances of one pool."""

import json
import subprocess

import pytest

from mooncake.cli.engine_settings import own_store_config, pool_environment
from tests.e2e.servers import Server
from tests.e2e.test_vllm_store import prompt
from tests.processes import BIN

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(240)]


def examine(pool, *servers) -> tuple[int, list[dict]]:
    words = [word for server in servers for word in ("--instance", f"http://127.0.0.1:{server.port}")]
    command = [str(BIN / "mooncake"), "doctor", "--json", "--probe", "--config", str(pool.config), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)["findings"]


def test_two_that_share_a_pool(pool, start):
    a, b = start(pool, a="kv_both", b="kv_consumer")
    code, findings = examine(pool, a, b)
    assert code == 0, findings
    found = {(one["area"], one["subject"]): one for one in findings}
    assert found["block hashes", "block size"]["text"] == "32 everywhere (from /metrics)"
    assert found["block hashes", "hash algorithm"]["text"] == "sha256 everywhere (from /metrics)"
    assert found["block hashes", "PYTHONHASHSEED"]["status"] == "unknown", "forks hide their environment"
    assert found["probe", f"127.0.0.1:{b.port}"]["text"].startswith("loaded 96 tokens of a new prompt that ")
    assert found["pool", "segments"]["text"].startswith("2 with ")


def test_two_that_do_not(pool, start):
    a, plain = start(pool, a="kv_both", plain=None)
    code, findings = examine(pool, a, plain)
    assert code == 1
    (proof,) = [one for one in findings if one["area"] == "probe"]
    assert proof["text"] == f"computed again what 127.0.0.1:{a.port} had saved: their blocks do not match"


def test_our_own_connector(pool, zygote, model, tmp_path, cleanup):
    """Two that share, and one whose hashes begin with another seed: known from what they tell of their keys."""

    def start(name: str, **more: str) -> Server:
        environment = {**pool_environment(pool.config), **more}
        server = Server(zygote, name, model, tmp_path, own_store_config(decline_slow_loads=False), environment)
        cleanup.callback(server.stop)
        return server

    a, b, other = start("a"), start("b"), start("other", PYTHONHASHSEED="7")
    for server in (a, b, other):
        server.wait_ready()
        server.ask(prompt(1, 4))
    code, findings = examine(pool, a, b)
    assert code == 0, findings
    found = {(one["area"], one["subject"]): one for one in findings}
    assert found["block hashes", "keys"]["status"] == "ok"
    assert found["block hashes", "PYTHONHASHSEED"]["text"] == "block hashes are chained from the same seed everywhere"
    assert found["pool", "keys of mooncake.vllm"]["text"].startswith("one fingerprint, ")
    assert found["probe", f"127.0.0.1:{b.port}"]["text"].startswith("loaded ")
    code, findings = examine(pool, a, other)
    assert code == 1
    failed = {one["subject"] for one in findings if one["status"] == "fail"}
    assert failed == {"PYTHONHASHSEED", f"127.0.0.1:{other.port}"}, findings
