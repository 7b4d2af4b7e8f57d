"""The master's configuration file: JSON and YAML, under the command line, with one sentence for every mistake."""

from pathlib import Path

import pytest

from mooncake.errors import ConfigError
from mooncake.master.flags import Settings, parse_command_line, read_settings


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str, *arguments: str, name: str = "master.json") -> Settings:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return read_settings(parse_command_line([f"--config_path={path}", *arguments]))

    return load


def test_json(load) -> None:
    found = load('{"rpc_port": 7002, "client_live_ttl_sec": 60, "eviction_ratio": 1, "default_kv_lease_ttl": "5s"}')
    assert found.rpc_port == 7002
    assert found.values["client_ttl"] == 60
    assert found.values["eviction_ratio"] == 1.0
    assert found.values["default_kv_lease_ttl"] == 5000


@pytest.mark.parametrize("name", ["master.yaml", "master.yml"])
def test_yaml(load, name: str) -> None:
    text = "rpc_port: 7003\nmetrics_host: 127.0.0.1\nenable_metric_reporting: false\ndefault_kv_lease_ttl: 500ms\n"
    found = load(text, name=name)
    assert found.rpc_port == 7003
    assert found.values["metrics_host"] == "127.0.0.1"
    assert found.values["enable_metric_reporting"] is False
    assert found.values["default_kv_lease_ttl"] == 500


def test_a_trailing_comma_is_tolerated(load) -> None:
    assert load('{"rpc_address": "a,}",\n "rpc_port": 7004,\n}').values["rpc_address"] == "a,}"


def test_the_command_line_wins(load) -> None:
    found = load('{"rpc_port": 7005, "metrics_port": 7006}', "--rpc_port=7007", "--metrics_port=9003")
    assert found.rpc_port == 7007
    assert found.values["metrics_port"] == 9003


def test_published_sample_is_accepted(load) -> None:
    """It sets parts of capabilities that it switches off."""
    found = load(
        '{"enable_metric_reporting": true, "rpc_thread_num": 16, "eviction_ratio": 0.1,'
        ' "eviction_high_watermark_ratio": 1.0, "enable_ha": false, "etcd_endpoints": "http://localhost:2379",'
        ' "enable_kv_events": false, "kv_events_bind_endpoint": "tcp://0.0.0.0:5557", "client_live_ttl_sec": 60}'
    )
    assert found.values["eviction_high_watermark_ratio"] == 1.0
    assert [note.split("=")[0] for note in found.notes] == [
        "rpc_thread_num",
        "etcd_endpoints",
        "kv_events_bind_endpoint",
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"rpc_port": "50051"}', ["rpc_port", "whole number", '"50051"']),
        ('{"rpc_port": true}', ["rpc_port", "whole number"]),
        ('{"rpc_port": 1.5}', ["rpc_port", "whole number"]),
        ('{"rpc_port": 70000}', ["rpc_port", "65535"]),
        ('{"enable_ha": "no"}', ["enable_ha", "true or false"]),
        ('{"rpc_address": 5}', ["rpc_address", "text"]),
        ('{"eviction_ratio": "much"}', ["eviction_ratio", "number"]),
        ('{"eviction_ratio": null}', ["eviction_ratio", "number"]),
        ('{"default_kv_lease_ttl": "soon"}', ["default_kv_lease_ttl", "milliseconds"]),
        ('{"default_kv_lease_ttl": [1]}', ["default_kv_lease_ttl", "milliseconds"]),
        ('{"rpc_prot": 1}', ["rpc_prot", "unknown", "rpc_port"]),
        ('{"client_ttl": 1}', ["client_ttl", "unknown", "client_live_ttl_sec"]),
        ('{"config_path": "x"}', ["config_path", "unknown"]),
        ('{"enable_oplog": true}', ["enable_oplog=true in ", "operation log"]),
        ('{"ha_backend_type": "zookeeper"}', ["ha_backend_type", "etcd, redis, k8s", "zookeeper"]),
        ('{"allocation_strategy": "cxl"}', ["allocation_strategy=", "CXL"]),
        ('["rpc_port"]', ["one mapping"]),
        ("null", ["one mapping"]),
        ("", ["cannot be understood", "line 1"]),
        ('{"rpc_port": 1', ["cannot be understood", "line 1, column"]),
        ('{"rpc_port": 1,,}', ["cannot be understood"]),
    ],
)
def test_mistakes_in_json(load, text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    message = str(caught.value)
    assert "master.json" in message
    assert "\n" not in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("text", "part"),
    [("rpc_port: [1", "line"), ("- a\n- b\n", "one mapping"), ("a: b: c", "line 1"), ("", "one mapping")],
)
def test_mistakes_in_yaml(load, text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=r"master\.yaml") as caught:
        load(text, name="master.yaml")
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, part in [
        (tmp_path / "absent.json", "No such file"),
        (tmp_path, "Is a directory"),
        (binary, "not UTF-8"),
    ]:
        with pytest.raises(ConfigError, match=part) as caught:
            read_settings(parse_command_line([f"--config_path={path}"]))
        assert str(path) in str(caught.value)
