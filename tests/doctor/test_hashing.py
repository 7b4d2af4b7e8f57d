"""Instances whose blocks cannot match: the doctor says which and why, and claims nothing that it has not seen."""

import json
import subprocess
import sys

import pytest

from mooncake.doctor.hashing import compare
from mooncake.doctor.instance import Instance, learn

STORE = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def transfer(number: int, **more) -> tuple[str, str]:
    """The flag of a MooncakeStoreConnector."""
    connector = {**STORE, "kv_connector_extra_config": {"lookup_rpc_port": number, **more}}
    return "--kv-transfer-config", json.dumps(connector)


@pytest.fixture
def pool(tmp_path):
    """Variables of an instance that is on a pool, by the master's address."""

    def make(master: str = "127.0.0.1:50051") -> dict[str, str]:
        file = tmp_path / f"{master.replace(':', '-')}.json"
        file.write_text(json.dumps({"master_server_address": master}))
        return {"MOONCAKE_CONFIG_PATH": str(file)}

    return make


def test_two_that_match(instance, examine, pool):
    report = examine(instance(*transfer(1), variables=pool()), instance(*transfer(2), variables=pool()))
    assert report.code == 0
    assert not report.failed()
    for subject, text in (
        ("block size", "32 everywhere (from /metrics)"),
        ("hash algorithm", "sha256 everywhere (from /metrics)"),
        ("model", "tiny everywhere (from /v1/models)"),
        ("tensor parallel", "1 everywhere (from the command line)"),
        ("PYTHONHASHSEED", "the seed is vLLM's fixed one everywhere"),
        ("pool", "all use the master 127.0.0.1:50051"),
    ):
        assert report.one(subject, "ok")["text"] == text
    assert [one for one in report.findings if one["area"] == "block hashes" and one["status"] != "ok"] == []


@pytest.mark.parametrize(
    ("setting", "first", "second", "has"),
    [
        ("block size", {}, {"labels": {"block_size": "64"}}, ("32", "64")),
        ("hash block size", {"labels": {"hash_block_size": "16"}}, {"labels": {"hash_block_size": "32"}}, ("16", "32")),
        ("hash algorithm", {}, {"labels": {"prefix_caching_hash_algo": "sha256_cbor"}}, ("sha256", "sha256_cbor")),
        ("KV dtype", {}, {"labels": {"cache_dtype": "fp8"}}, ("auto (the model's own)", "fp8")),
        ("KV layout", {"labels": {"kv_cache_layout": "LBNHC"}}, {"labels": {"kv_cache_layout": "LBHNC"}},
         ("LBNHC", "LBHNC")),
        ("dtype", {"flags": ("--dtype", "float16")}, {"flags": ("--dtype=bfloat16",)}, ("float16", "bfloat16")),
        ("tensor parallel", {}, {"flags": ("-tp", "2")}, ("1", "2")),
        ("pipeline parallel", {}, {"flags": ("--pipeline_parallel_size", "2")}, ("1", "2")),
        ("model", {}, {"root": "/models/other"}, ("tiny", "other")),
        ("PYTHONHASHSEED", {"variables": {"PYTHONHASHSEED": "0"}}, {"variables": {"PYTHONHASHSEED": "1"}},
         ('"0"', '"1"')),
        ("PYTHONHASHSEED", {}, {"variables": {"PYTHONHASHSEED": "0"}}, ("vLLM's fixed one", '"0"')),
    ],
)  # fmt: skip
def test_two_that_differ(instance, examine, setting, first, second, has):
    one, two = (instance(*how.pop("flags", ()), **how) for how in (dict(first), dict(second)))
    report = examine(one, two)
    assert report.code == 1
    assert report.failed() == [setting]
    found = report.one(setting, "fail")
    assert found["text"].startswith(f"{one.name} has {has[0]}, {two.name} has {has[1]}: ")
    assert found["advice"]


def test_the_odd_one_of_three_is_named(instance, examine):
    one, two, odd = instance(), instance(), instance(labels={"block_size": "128"})
    text = examine(one, two, odd).one("block size", "fail")["text"]
    assert text == f"{one.name} and {two.name} have 32, {odd.name} has 128: their blocks never match"


def test_xxhash_needs_a_seed(instance, examine):
    labels = {"prefix_caching_hash_algo": "xxhash"}
    alone, other = instance(labels=labels), instance(labels=labels, variables={"PYTHONHASHSEED": "3"})
    found = examine(alone, other).one("PYTHONHASHSEED", "fail")
    assert found["text"].startswith(
        f"the seed of {alone.name} is random at every start (xxhash without PYTHONHASHSEED)"
    )
    report = examine(other, instance(labels=labels, variables={"PYTHONHASHSEED": "3"}))
    assert (report.code, report.one("PYTHONHASHSEED", "ok")["text"]) == (0, 'the seed is "3" everywhere')


def test_data_parallel_engines_of_one_instance_need_a_seed_too(instance, examine):
    one = instance(engines=2, labels={"prefix_caching_hash_algo": "xxhash"})
    report = examine(one)
    assert report.code == 1
    assert "its 2 data-parallel engines each hash with a random seed" in report.one(one.name, "fail")["text"]


def test_older_releases_may_draw_a_seed(instance, examine):
    report = examine(instance(version="0.25.1"), instance(version="0.25.1"))
    assert report.code == 0
    assert "may draw a random seed" in report.one("PYTHONHASHSEED", "warn")["text"]


def test_prefix_caching_that_is_off(instance, examine):
    one = instance(labels={"enable_prefix_caching": "False"})
    assert "it hashes no blocks" in examine(one).one(one.name, "fail")["text"]


def test_the_connectors(instance, examine, pool):
    one = instance(*transfer(1), variables=pool())
    same_lookup = instance(*transfer(1, cache_prefix="mine"), variables=pool("10.0.0.1:50051"))
    report = examine(one, same_lookup)
    assert set(report.failed()) == {"lookup_rpc_port", "pool", "cache_prefix"}
    assert f"{one.name} and {same_lookup.name} share the number 1" in report.one("lookup_rpc_port", "fail")["text"]
    assert "they are on different pools" in report.one("pool", "fail")["text"]

    straight = json.dumps({"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"})
    other = instance("--kv-transfer-config", straight, labels={"block_size": "64"})
    report = examine(one, instance(*transfer(2), variables=pool()), other)
    assert report.code == 0, "an instance that is on no pool need not match"
    assert report.one(other.name, "warn")["text"] == "has no MooncakeStoreConnector: it is on no pool"


def own(**more) -> tuple[str, str]:
    """The flag of mooncake.vllm's connector."""
    connector = {"kv_connector": "MooncakeStoreConnector", "kv_connector_module_path": "mooncake.vllm"}
    return "--kv-transfer-config", json.dumps({**connector, "kv_role": "kv_both", "kv_connector_extra_config": more})


def test_our_own_connector(instance, examine, pool):
    """Files are compared, not names; neither a look-up port nor a policy for lost blocks is wanted."""
    one = instance(*own(), variables=pool(), identity=["aa", "01"])
    two = instance(*own(), variables=pool(), identity=["aa", "01"], root="/models/another-name")
    report = examine(one, two)
    assert not report.failed()
    assert report.one("keys", "ok")["text"].endswith("are the same everywhere")
    assert report.one("PYTHONHASHSEED", "ok")["text"] == "block hashes are chained from the same seed everywhere"
    assert [finding for finding in report.findings if finding["status"] == "warn"] == []


@pytest.mark.parametrize(
    ("second", "subject", "text"),
    [
        (
            {"identity": ["bb", "01"]},
            "keys",
            "{one} has aa, {two} has bb: weights, data types, layout, ranks or settings",
        ),
        (
            {"identity": ["aa", "02"]},
            "PYTHONHASHSEED",
            "block hashes are chained from different seeds ({one} has 01, {two}",
        ),
    ],
)
def test_our_own_connectors_that_cannot_match(instance, examine, pool, second, subject, text):
    one = instance(*own(), variables=pool(), identity=["aa", "01"])
    two = instance(*own(), variables=pool(), **second)
    report = examine(one, two)
    assert report.failed() == [subject]
    found = report.one(subject, "fail")["text"]
    assert found.startswith(text.format(one=one.name, two=two.name))
    assert found.endswith("their blocks never match")


def test_our_own_connectors_that_have_served_nothing(instance, examine, pool):
    one, two = instance(*own(), variables=pool(), identity=["aa", "01"]), instance(*own(), variables=pool())
    report = examine(one, two)
    assert report.one("keys", "unknown")["text"].startswith(f"not known of {two.name}: an instance tells it once")
    assert report.one("PYTHONHASHSEED", "ok")["text"] == "the seed is vLLM's fixed one everywhere"


def test_both_connectors_in_one_pool(instance, examine, pool):
    one, two = instance(*own(), variables=pool()), instance(*transfer(1), variables=pool())
    report = examine(one, two)
    assert report.failed() == ["connector"]
    found = report.one("connector", "fail")["text"]
    assert found.startswith(f"{one.name} has mooncake.vllm's, {two.name} has vLLM's own: their keys differ")


def test_inside_of_a_multi_connector(instance, examine):
    straight = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
    connectors = [straight, {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}]
    extra = {"connectors": connectors}
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    one = instance("--kv-transfer-config", json.dumps(config))
    found = [finding for finding in examine(one).all(one.name) if finding["status"] == "warn"]
    assert ["fails the request (kv_load_failure_policy)" in finding["text"] for finding in found] == [True]


def test_server_info_wins(instance):
    info = {
        "model_config": {"model": "/else/where", "dtype": "torch.float16", "quantization": None, "revision": None},
        "cache_config": {"block_size": 48, "prefix_caching_hash_algo": "xxhash_cbor", "cache_dtype": "fp8"},
        "parallel_config": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
        "kv_transfer_config": {**STORE, "kv_connector_extra_config": {}},
    }
    found = learn(instance("--dtype", "float32", server_info=info).url, 5)
    told = [found.known[name] for name in ("model", "dtype", "block size", "KV dtype", "tensor parallel")]
    assert told == ["/else/where", "float16", "48", "fp8", "4"]
    assert found.store is not None
    assert found.told_by["block size"] == "/server_info"


def test_what_was_not_seen_is_not_claimed(instance, examine, cleanup):
    """Behind a tunnel the process and its environment cannot be seen, whatever those of the tunnel are."""
    far, near = instance(), instance(*transfer(1), variables={"PYTHONHASHSEED": "0"})
    tunnel = subprocess.Popen(
        [sys.executable, "-c", _TUNNEL, str(far.port)], stdout=subprocess.PIPE, text=True, env={"PYTHONHASHSEED": "0"}
    )
    cleanup.callback(tunnel.communicate)
    cleanup.callback(tunnel.kill)
    far.url = f"http://127.0.0.1:{tunnel.stdout.readline().strip()}"
    report = examine(near, far)
    assert report.code == 0
    for subject in ("PYTHONHASHSEED", "dtype", "tensor parallel"):
        found = next(one for one in report.all(subject) if one["subject"] == subject)
        assert found["status"] == "unknown"
        assert "who listens there is no vLLM: pid" in found["text"]
        assert "needs VLLM_SERVER_DEV_MODE=1" in found["text"]
    assert report.one("block size", "ok")


_TUNNEL = """
import socket, sys, threading
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
def pump(source, sink):
    while data := source.recv(65536):
        sink.sendall(data)
    sink.shutdown(socket.SHUT_WR)
while True:
    near = server.accept()[0]
    far = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    for pair in ((near, far), (far, near)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


def test_a_flag_file_leaves_flags_unknown(instance, examine):
    report = examine(instance("--config", "vllm.yaml"), instance(*transfer(1)))
    found = next(one for one in report.findings if one["subject"] == "tensor parallel")
    assert found["status"] == "unknown"
    assert "they are in the file vllm.yaml" in found["text"]


def test_a_dtype_that_may_be_the_same():
    one, two = (
        Instance(url, {"dtype": dtype, "hash algorithm": "sha256"}, answers=True)
        for url, dtype in (("http://a:1", "auto"), ("http://b:1", "float16"))
    )
    found = next(finding for finding in compare([one, two]) if finding.subject == "dtype")
    assert found.status == "unknown"
    assert found.text.endswith("whether that is the same depends on the model")


def test_an_instance_that_is_not_there(instance, examine):
    one, two = instance(), instance()
    two.stop()
    report = examine(one, two)
    assert report.code == 1
    assert report.one(two.name, "fail")["text"] == "the instance does not answer: Connection refused"


def test_an_instance_that_hangs(instance, examine):
    hanging = instance(hang=True)
    report = examine(instance(), hanging)
    assert report.one(hanging.name, "fail")["text"] == "the instance does not answer: no answer within 2 s"


@pytest.mark.parametrize(
    ("second", "status", "text"),
    [
        ({"loads": 96}, "ok", "loaded 96 tokens of a new prompt that {first} had saved"),
        ({"loads": 0, "declines": 3}, "ok", "found what {first} had saved, and computed it as that is quicker"),
        ({"loads": 0}, "fail", "computed again what {first} had saved: their blocks do not match"),
        ({"status": 500}, "fail", "it does not answer a request: HTTP 500"),
    ],
)
def test_the_probe(instance, doctor, second, status, text):
    one, two = instance(*transfer(1), saves=3), instance(*transfer(2), **second)
    report = doctor("--probe", "--instance", one.url, "--instance", two.url)
    (found,) = [finding for finding in report.findings if finding["area"] == "probe"]
    assert (found["subject"], found["status"]) == (two.name, status)
    assert found["text"].startswith(text.format(first=one.name))


def test_a_probe_that_saves_nothing(instance, doctor):
    report = doctor("--probe", "--instance", instance().url, "--instance", instance().url)
    assert [one["status"] for one in report.findings if one["area"] == "probe"] == ["unknown"]
