"""What users may set, and what they are told when it cannot be used."""

import json

import pytest

from mooncake.errors import ConfigError
from mooncake.vllm.settings import Settings, read_pool_config
from mooncake.vllm.versions import check_version

POOL = {"metadata_server": "P2PHANDSHAKE", "master_server_address": "127.0.0.1:50051", "protocol": "tcp"}


@pytest.fixture
def read(monkeypatch, tmp_path):
    for name in ("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "VLLM_HOST_IP", "MOONCAKE_MASTER"):
        monkeypatch.delenv(name, raising=False)

    def read(**content):
        path = tmp_path / "pool.json"
        path.write_text(json.dumps(POOL | content))
        monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
        return read_pool_config()

    return read


def test_the_published_file(read, monkeypatch):
    config = read(device_name="", mode="embedded", global_segment_size="2GB", local_buffer_size="64MB")
    assert (config.global_segment_size, config.master_server_address) == (2 << 30, "127.0.0.1:50051")
    assert config.local_hostname
    assert read().global_segment_size == 4 << 30
    assert read(mode="standalone-store").global_segment_size == 0
    assert read(local_hostname="10.1.1.1").local_hostname == "10.1.1.1"
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.1.2")
    assert read(local_hostname="10.1.1.1").local_hostname == "10.1.1.1"
    assert read().local_hostname == "10.1.1.2"
    monkeypatch.setenv("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "10.1.1.3")
    assert read(local_hostname="10.1.1.1").local_hostname == "10.1.1.3"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"mode": "embeded"}, "wrong in mode: expected one of embedded, standalone-store"),
        ({"mode": "standalone-store", "global_segment_size": "1GB"}, "mode standalone-store needs 0"),
        ({"global_segment_size": 0}, "mode embedded needs more than 0"),
        ({"master_server_address": ""}, "lacks the field master_server_address"),
        ({"global_segment_size": "much"}, "wrong in global_segment_size"),
    ],
)
def test_a_wrong_file(read, content, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read(**content)


def test_a_tenant(read):
    assert read(tenant_id="me").tenant_id == "me"


def test_no_file(read, monkeypatch):
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    with pytest.raises(ConfigError, match="set one of them"):
        read_pool_config()
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:50051")
    assert read_pool_config().master_server_address == "127.0.0.1:50051"


def test_extra_config(caplog):
    assert Settings.of({}) == Settings()
    given = {"lookup_budget_ms": 20, "save_decode_cache": "true", "lookup_rpc_port": 1, "load_async": True}
    assert Settings.of(given) == Settings(lookup_budget_ms=20, save_decode_cache=True)
    assert not caplog.records
    Settings.of({"lookup_budget": 1})
    assert "lookup_budget" in caplog.text
    for extra, sentence in (
        ({"lookup_budget_ms": -1}, "lookup_budget_ms: expected a whole number from 0"),
        ({"save_decode_cache": 3}, "save_decode_cache: expected true or false"),
        ({"cache_prefix": "a/b"}, "cache_prefix: expected text without /"),
        ({"max_pinned_percent": 0}, "max_pinned_percent: expected a whole number from 1 to 90"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Settings.of(extra)


def test_versions():
    for version in ("0.25.1", "0.25.1+cu130", "0.32.0", "0.32.0+cpu", "0.32.1"):
        check_version(version)
    for version in ("0.25.0", "0.25.10", "0.31.9", "0.33.0", "1.0", "dev"):
        with pytest.raises(ConfigError, match=r"supports vLLM 0\.25\.1 and 0\.32\.x, but this is"):
            check_version(version)
