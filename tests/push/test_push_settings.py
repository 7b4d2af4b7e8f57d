"""What a user may set, and what is said of what cannot be used."""

import pytest

from mooncake.errors import ConfigError
from mooncake.vllm.push.settings import LIMIT_VARIABLE, PORT_VARIABLE, PushSettings


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (PORT_VARIABLE, LIMIT_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_those_of_vllm_where_it_has_any():
    settings = PushSettings.of({})
    assert (settings.bootstrap_port, settings.abort_limit, settings.bootstrap_server_address) == (8998, 480, "")


def test_everything_set(monkeypatch):
    monkeypatch.setenv(PORT_VARIABLE, "9001")
    monkeypatch.setenv(LIMIT_VARIABLE, "60")
    extra = {"num_workers": 10, "mooncake_protocol": "TCP", "bootstrap_server_address": "host:8998"}
    assert PushSettings.of(extra) == PushSettings(10, "tcp", "host:8998", 9001, 60)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_workers", 0, "a whole number from 1 to 64"),
        ("num_workers", "many", "a whole number from 1 to 64"),
        ("mooncake_protocol", "udp", "tcp or rdma"),
        ("bootstrap_server_address", "host", "host:port"),
        ("bootstrap_server_address", "host:70000", "host:port"),
    ],
)
def test_wrong_settings_are_named(name, value, expected):
    with pytest.raises(ConfigError, match=f"kv_connector_extra_config is wrong in {name}: expected {expected}"):
        PushSettings.of({name: value})


@pytest.mark.parametrize(("name", "value"), [(PORT_VARIABLE, "0"), (PORT_VARIABLE, "x"), (LIMIT_VARIABLE, "-1")])
def test_wrong_variables_are_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"the variable {name} is wrong: expected a whole number from 1 to"):
        PushSettings.of({})


def test_unknown_settings_are_said(caplog):
    PushSettings.of({"num_worker": 3, "device_name": ""})
    assert "has num_worker, which is not a setting" in caplog.text
    assert "device_name" not in caplog.text
