"""A pool's services: up, down, stopped, of another kind, and what its keys tell; all in bounded time."""

import json
import signal
import socket
import subprocess
import time

import pytest

from tests.processes import BIN, free_port, stop
from tests.proxy.processes import Engine, Proxy

MIB = 1 << 20


@pytest.fixture
def config(tmp_path):
    """A pool's file."""

    def write(master: str, **more):
        file = tmp_path / "pool.json"
        fields = {"metadata_server": "P2PHANDSHAKE", "master_server_address": master, "protocol": "tcp", **more}
        file.write_text(json.dumps(fields))
        return file

    return write


def test_a_pool_in_order(doctor, master, make_store, config):
    store = make_store(segment=16 * MIB)
    store.put("key", b"value")
    report = doctor("--config", config(master.address))
    assert report.code == 0, report.text
    assert report.one(f"master {master.address}", "ok")["text"].endswith(f"; pid {master.process.pid}")
    metrics = report.one("metrics of the master", "ok")["text"]
    assert f":{master.metrics_port} answers" in metrics, "found, though it is not the usual port"
    assert report.one("segments", "ok")["text"].startswith("1 with 0.02 GiB")
    assert report.one("data ports", "ok")
    assert report.one("keys", "ok")["text"].startswith("1, none by vLLM's connectors")
    assert report.one("metadata service", "ok")["text"] == "P2PHANDSHAKE: none is needed"
    assert report.one(f"{master.port} (master)", "ok")["text"].startswith(f"taken by pid {master.process.pid} (")


def test_an_empty_pool(doctor, master):
    report = doctor("--master", master.address, "--metrics-port", master.metrics_port)
    assert report.code == 0
    assert report.one("segments", "warn")["text"] == "nobody gives memory to this pool: nothing can be put"


def test_the_environment_names_the_pool(doctor, master, config):
    assert doctor(MOONCAKE_MASTER=master.address).one(f"master {master.address}", "ok")
    assert doctor(MOONCAKE_CONFIG_PATH=str(config(master.address))).one(f"master {master.address}", "ok")


def test_nobody_listens(doctor):
    port = free_port()
    report = doctor("--master", f"127.0.0.1:{port}")
    assert report.code == 1
    found = report.one("master", "fail")
    assert (found["text"], found["advice"]) == ("nothing listens there", f"Start it: mooncake_master --rpc_port={port}")
    assert report.one("metrics of the master", "unknown")
    assert report.one(f"{port} (master)", "ok")["text"] == "free"


def test_a_name_that_is_unknown(doctor):
    found = doctor("--master", "no-such-host.invalid:50051").one("master no-such", "fail")
    assert found["text"] == "the name no-such-host.invalid is not known here"


def test_a_master_that_is_stopped(doctor, master):
    stop(master.process.pid)
    start = time.monotonic()
    report = doctor("--master", master.address, "--metrics-port", master.metrics_port, "--timeout", 1)
    assert time.monotonic() - start < 20
    master.signal(signal.SIGCONT)
    assert report.code == 1
    found = report.one(f"master {master.address}", "fail")
    assert found["text"].startswith(f"pid {master.process.pid} (")
    assert found["text"].endswith("is stopped: it takes connections and answers nothing")
    assert found["advice"] == f"Let it go on: kill -CONT {master.process.pid}"
    assert "no answer within 1 s" in report.one("metrics of the master", "unknown")["text"]


def test_the_metrics_port_is_not_the_rpc_port(doctor, master):
    found = doctor("--master", f"127.0.0.1:{master.metrics_port}").one("master", "fail")
    assert found["text"].startswith("what listens there is no master of mooncake-py")


def test_one_that_says_nothing(doctor):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        found = doctor("--master", f"127.0.0.1:{port}", "--timeout", "0.5").one("master", "fail")
    assert found["text"].startswith("it takes connections but did not answer within 0.5 s; pid ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "/no/such/file"), "The pool's configuration file /no/such/file cannot be read"),
        (("--metrics-port", "x"), 'expected a whole number, but found "x"'),
        (("--timeout", "0"), 'expected seconds, above 0 and up to 60, but found "0"'),
    ],
)
def test_wrong_flags(arguments, message):
    command = [str(BIN / "mooncake"), "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_a_file_without_a_master(tmp_path):
    file = tmp_path / "pool.json"
    file.write_text("{}")
    command = [str(BIN / "mooncake"), "doctor", "--config", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, "it names no pool; the host is looked at"


def test_a_table_for_people(master):
    command = [str(BIN / "mooncake"), "doctor", "--master", master.address, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert "pool" in lines
    assert any(line.startswith("  warn     segments") for line in lines)
    assert any("→ Start one with mooncake_client" in line for line in lines)
    assert not any(line.startswith("  ok ") for line in lines)
    assert lines[-1].endswith(" unknown")


def test_a_segment_that_is_larger_than_the_memory(doctor, master, config):
    found = doctor("--config", config(master.address, global_segment_size="90TB")).one("memory", "fail")
    assert "but global_segment_size is 92160.0 GiB" in found["text"]


@pytest.mark.parametrize(
    ("metadata", "status", "text"),
    [
        ("http://127.0.0.1:1/metadata", "fail", "http://127.0.0.1:1/metadata: Connection refused"),
        ("etcd://127.0.0.1:1", "fail", "etcd://127.0.0.1:1 cannot be reached: Connection refused"),
    ],
)
def test_a_metadata_service_that_is_not_there(doctor, master, config, metadata, status, text):
    found = doctor("--config", config(master.address, metadata_server=metadata)).one("metadata service", status)
    assert found["text"] == text


# ------------------------------------------------------------ what the keys tell

KEY = "tiny@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0@{hash}"


def keys(number: int, ranks=(0,), digits: int = 64) -> list[str]:
    return [KEY.format(rank=rank, hash=f"{number:0{digits}x}") for rank in ranks]


def put_blocks(store, names: list[str], size: int = 4096) -> None:
    assert store.put_batch(names, [bytes(size)] * len(names)) == 0


def test_keys_that_tell_nothing_bad(doctor, master, make_store):
    put_blocks(make_store(segment=16 * MIB), [key for i in range(20) for key in keys(i, (0, 1))])
    found = doctor("--master", master.address).one("keys of tiny", "ok")
    assert found["text"] == "one hash length, one layout of ranks, one size of block in 40"


@pytest.mark.parametrize(
    ("more", "size", "text"),
    [
        (keys(99, digits=32), 4096, "hashes of different algorithms (20 with 256 bits, 1 with 128 bits)"),
        (
            keys(99, (0, 1)),
            4096,
            "blocks of different TP sizes, or some ranks' parts are gone: 20 blocks of 1 TP ranks",
        ),
        (keys(99), 8192, "blocks of one kind have 4096 and 8192 bytes: block size, dtype or layers differ"),
    ],
)
def test_keys_of_instances_that_cannot_match(doctor, master, make_store, more, size, text):
    store = make_store(segment=16 * MIB)
    put_blocks(store, [key for i in range(20) for key in keys(i)])
    put_blocks(store, more, size)
    report = doctor("--master", master.address)
    assert report.code == 0, "they may be of an instance that is gone"
    assert report.one("keys of tiny", "warn")["text"].startswith(text)


OWN_KEY = "vllm/{fingerprint}/tp{rank}pp0/{hash}"


def own_keys(fingerprint: str, numbers: range, adapter: str = "") -> list[str]:
    return [
        OWN_KEY.format(fingerprint=fingerprint * 32, rank=rank, hash=f"{adapter}{i:064x}")
        for i in numbers
        for rank in (0, 1)
    ]


def test_keys_of_our_own_connector(doctor, master, make_store):
    store = make_store(segment=16 * MIB)
    put_blocks(store, [*own_keys("a", range(5)), *own_keys("a", range(2), adapter="lora-0f/")])
    report = doctor("--master", master.address)
    assert report.one("keys of mooncake.vllm", "ok")["text"] == "one fingerprint, aaaaaaaa"
    assert next(one["text"] for one in report.all("keys")) == "14, 14 by mooncake.vllm's"
    put_blocks(store, [*own_keys("b", range(3)), *keys(1)])
    report = doctor("--master", master.address)
    assert report.code == 0, "they may be different models"
    found = report.one("keys of mooncake.vllm", "warn")["text"]
    assert found.startswith("2 fingerprints, aaaaaaaa (14 keys), bbbbbbbb (6 keys): engines of different ones never")
    assert next(one["text"] for one in report.all("keys")) == "21, 1 by vLLM's own connector, 20 by mooncake.vllm's"


# ------------------------------------------------------------ proxies


def test_a_proxy_and_its_instances(doctor, cleanup):
    engine = Engine()
    cleanup.callback(engine.stop)
    proxy = Proxy(decode=[engine])
    cleanup.callback(proxy.stop)
    report = doctor("--proxy", proxy.url)
    assert report.one(proxy.url.removeprefix("http://"), "ok")["text"] == "answers; 0 prefill and 1 decode"
    told = report.one(f"127.0.0.1:{engine.port}", "ok")["text"]
    assert "told by /v1/models" in told, "its instances are asked as well"
    engine.kill()
    report = doctor("--proxy", proxy.url)
    assert report.code == 1
    assert f"127.0.0.1:{engine.port}" in report.failed()
    proxy.stop()
    assert doctor("--proxy", proxy.url).one(proxy.url.removeprefix("http://"), "fail")
