"""MooncakeConfig from keywords, file and environment; sizes, truth values; one sentence for every mistake."""

import json
import logging
from pathlib import Path

import pytest

from mooncake.config_text import parse_bool, parse_size
from mooncake.errors import ConfigError
from mooncake.mooncake_config import MooncakeConfig

COMPLETE = {"local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "master_server_address": "m:50051"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("MOONCAKE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path: Path):
    def write(content: object) -> str:
        path = tmp_path / "mooncake.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("1b", 1),
        ("1k", 1 << 10),
        ("2KB", 2 << 10),
        ("64mb", 64 << 20),
        ("64 MB", 64 << 20),
        ("3M", 3 << 20),
        (" 4gb ", 4 << 30),
        ("4G", 4 << 30),
        ("1.5GB", 3 << 29),
        ("1tb", 1 << 40),
        ("2T", 2 << 40),
        ("1GiB", 1 << 30),
        (1e9, 10**9),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "50%", "gb", "-1", -1, "1 2", "1xb", None, True, 1.5, [], "1e3", "nan"])
def test_wrong_sizes(text: object) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)


def test_truth_values() -> None:
    for word in ("true", "1", "YES", "on", "enable", True, 1):
        assert parse_bool(word) is True
    for word in ("false", "0", "No", "off", "disable", False, 0):
        assert parse_bool(word) is False
    for word in ("maybe", "", None, 2):
        with pytest.raises(ValueError, match="expected true or false"):
            parse_bool(word)


def test_keywords_and_defaults() -> None:
    config = MooncakeConfig(**COMPLETE)
    assert config.global_segment_size == 3355443200
    assert config.local_buffer_size == 1073741824
    assert (config.protocol, config.device_name, config.tenant_id) == ("tcp", "", "default")
    assert (config.enable_ssd_offload, config.ssd_offload_path) == (False, "")
    assert (config.enable_client_http_server, config.client_http_port) == (False, 9300)
    assert MooncakeConfig("h", "P2PHANDSHAKE", 1, 2, "RDMA", None, "m:1").protocol == "rdma"


def test_from_file(write) -> None:
    config = MooncakeConfig.from_file(
        write(
            COMPLETE
            | {
                "global_segment_size": "1gb",
                "local_buffer_size": 5,
                "protocol": "RDMA",
                "device_name": "mlx5_0",
                "enable_ssd_offload": "yes",
                "ssd_offload_path": "/ssd",
                "tenant_id": "a",
                "enable_client_http_server": True,
                "client_http_port": "9301",
                "mode": "a field of another program",
            }
        )
    )
    assert config == MooncakeConfig(
        **COMPLETE,
        global_segment_size=1 << 30,
        local_buffer_size=5,
        protocol="rdma",
        device_name="mlx5_0",
        enable_ssd_offload=True,
        ssd_offload_path="/ssd",
        tenant_id="a",
        enable_client_http_server=True,
        client_http_port=9301,
    )


def test_null_is_the_default(write) -> None:
    content = COMPLETE | {"device_name": None, "ssd_offload_path": None, "tenant_id": None, "global_segment_size": None}
    assert MooncakeConfig.from_file(write(content)) == MooncakeConfig(**COMPLETE)


def test_a_trailing_comma_is_tolerated(write) -> None:
    text = '{"local_hostname": "a,}", "metadata_server": "P2PHANDSHAKE",\n"master_server_address": "m:1",\n}\n'
    assert MooncakeConfig.from_file(write(text)).local_hostname == "a,}"


def test_unknown_protocol_only_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert MooncakeConfig(**COMPLETE, protocol="Pigeon").protocol == "pigeon"
    assert "pigeon" in caplog.text


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"local_hostname": None}, ["lacks", "local_hostname"]),
        ({"metadata_server": ""}, ["metadata_server", "not empty"]),
        ({"master_server_address": 5}, ["master_server_address", "text"]),
        ({"global_segment_size": "50%"}, ["global_segment_size", "size", "50%"]),
        ({"local_buffer_size": -1}, ["local_buffer_size", "size"]),
        ({"protocol": ""}, ["protocol", "text"]),
        ({"device_name": 5}, ["device_name", "text"]),
        ({"enable_ssd_offload": "perhaps"}, ["enable_ssd_offload", "true or false", "perhaps"]),
        ({"client_http_port": 70000}, ["client_http_port", "65535"]),
        ({"client_http_port": "http"}, ["client_http_port", "whole number"]),
    ],
)
def test_mistakes_in_the_file(write, change: dict[str, object], parts: list[str]) -> None:
    path = write(COMPLETE | change)
    with pytest.raises(ValueError) as caught:
        MooncakeConfig.from_file(path)
    text = str(caught.value)
    assert path in text
    assert "\n" not in text
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a" 1}'])
def test_broken_files(write, text: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        MooncakeConfig.from_file(path)
    assert path in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json cannot be read: No such file"):
        MooncakeConfig.from_file(str(tmp_path / "absent.json"))


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", "m:1")
    config = MooncakeConfig.load_from_env()
    assert config == MooncakeConfig("localhost", "P2PHANDSHAKE", master_server_address="m:1")
    for name, value in {
        "LOCAL_HOSTNAME": "h",
        "TE_META_DATA_SERVER": "http://x/metadata",
        "GLOBAL_SEGMENT_SIZE": "4GB",
        "LOCAL_BUFFER_SIZE": "16 mb",
        "PROTOCOL": "TCP",
        "DEVICE": "d",
        "OFFLOAD_ENABLED": "on",
        "OFFLOAD_FILE_STORAGE_PATH": "/p",
        "TENANT_ID": "t",
        "ENABLE_CLIENT_HTTP_SERVER": "1",
        "CLIENT_HTTP_PORT": "9400",
    }.items():
        monkeypatch.setenv(f"MOONCAKE_{name}", value)
    assert MooncakeConfig.load_from_env() == MooncakeConfig(
        "h", "http://x/metadata", 4 << 30, 16 << 20, "tcp", "d", "m:1", True, "/p", "t", True, 9400
    )


def test_mistakes_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"MOONCAKE_CONFIG_PATH.*MOONCAKE_MASTER"):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", "/absent/pool.json")
    with pytest.raises(ConfigError, match=r"MOONCAKE_CONFIG_PATH is /absent/pool\.json, which cannot be read"):
        MooncakeConfig.load_from_env()
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH")
    monkeypatch.setenv("MOONCAKE_MASTER", "m:1")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "lots")
    with pytest.raises(ConfigError, match=r"variable MOONCAKE_GLOBAL_SEGMENT_SIZE is wrong: expected a size.*lots"):
        MooncakeConfig.load_from_env()


def test_the_file_decides_everything(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", write(COMPLETE))
    monkeypatch.setenv("MOONCAKE_MASTER", "other:1")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    assert MooncakeConfig.load_from_env() == MooncakeConfig(**COMPLETE)
