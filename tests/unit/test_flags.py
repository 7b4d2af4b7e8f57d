"""The master's command line: every gflags form, and one sentence for every mistake."""

import re
from pathlib import Path

import pytest

from mooncake.errors import ConfigError
from mooncake.master.flag_table import FLAGS, Flag, Kind
from mooncake.master.flags import Settings, help_text, parse_command_line, read_settings

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def settings(*arguments: str) -> Settings:
    return read_settings(parse_command_line(arguments))


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults() -> None:
    found = settings()
    assert found.values["default_kv_lease_ttl"] == 10_000
    assert found.values["client_ttl"] == 10
    assert found.rpc_port == 50051
    assert found.notes == []
    assert all(found.values[flag.name] == flag.default for flag in FLAGS)


@pytest.mark.parametrize(
    "arguments",
    [["--rpc_port=7001"], ["-rpc_port=7001"], ["--rpc_port", "7001"], ["-rpc_port", "7001"], ["--port=7001"]],
)
def test_value_forms(arguments: list[str]) -> None:
    assert settings(*arguments).rpc_port == 7001


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--enable_metric_reporting", True),
        ("-enable_metric_reporting", True),
        ("--enable_metric_reporting=true", True),
        ("--enable_metric_reporting=1", True),
        ("--noenable_metric_reporting", False),
        ("-noenable_metric_reporting", False),
        ("--enable_metric_reporting=false", False),
        ("--enable_metric_reporting=no", False),
    ],
)
def test_truth_forms(argument: str, expected: bool) -> None:
    assert settings(argument).values["enable_metric_reporting"] is expected


def test_a_truth_flag_takes_no_following_value() -> None:
    assert '"false"' in refusal("--enable_metric_reporting", "false")


def test_the_last_one_counts_and_text_may_be_empty() -> None:
    assert settings("--rpc_port=1", "--rpc_port=2").rpc_port == 2
    assert settings("--rpc_interface=").values["rpc_interface"] == ""


@pytest.mark.parametrize(
    ("text", "ms"), [("10000", 10_000), ("500ms", 500), ("10s", 10_000), ("5m", 300_000), ("1h", 3_600_000)]
)
def test_durations(text: str, ms: int) -> None:
    assert settings(f"--default_kv_lease_ttl={text}").values["default_kv_lease_ttl"] == ms


@pytest.mark.parametrize("flag", ["default_kv_lease_ttl", "default_kv_soft_pin_ttl", "max_kv_soft_pin_ttl"])
@pytest.mark.parametrize("text", ["abc", "1.5s", "-1", "10 days", ""])
def test_wrong_durations(flag: str, text: str) -> None:
    assert flag in refusal(f"--{flag}={text}")


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--rpc_port=abc", ["rpc_port", "whole number", "abc"]),
        ("--rpc_port=70000", ["rpc_port", "65535", "70000"]),
        ("--metrics_port=-1", ["metrics_port", "-1"]),
        ("--eviction_ratio=7", ["eviction_ratio", "0.0 to 1.0"]),
        ("--eviction_ratio=nan", ["eviction_ratio"]),
        ("--enable_ha=maybe", ["enable_ha", "true or false", "maybe"]),
        ("--allocation_strategy=best", ["allocation_strategy", "random", "best"]),
        ("--rpc_port", ["rpc_port", "lacks its value"]),
        ("--nonsense=1", ["nonsense", "unknown", "--help"]),
        ("--rpc-port=1", ["rpc-port", "--rpc_port"]),
        ("--norpc_port", ["norpc_port", "unknown"]),
        ("master", ["master", "not a flag"]),
        ("--default_kv_soft_pin_ttl=48h", ["default_kv_soft_pin_ttl", "max_kv_soft_pin_ttl"]),
    ],
)
def test_mistakes(argument: str, parts: list[str]) -> None:
    text = refusal(argument)
    assert all(part in text for part in parts), text


def _another_value(flag: Flag) -> str:
    if flag.kind is Kind.BOOL:
        return "false" if flag.default else "true"
    if flag.kind is Kind.STRING:
        return "elsewhere"
    return "1" if flag.default != 1 else "2"


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.lacks], ids=lambda flag: flag.name)
def test_what_is_not_here_is_refused_by_name(flag: Flag) -> None:
    at_default = "false" if flag.default is False else "true" if flag.default is True else str(flag.default)
    assert settings(f"--{flag.name}={at_default}").notes == []
    text = refusal(f"--{flag.name}={_another_value(flag)}")
    assert text.startswith(f"--{flag.name}=")
    assert flag.lacks is not None
    assert flag.lacks.name in text
    assert f"leave {flag.name} at its default" in text


@pytest.mark.parametrize(
    "argument",
    ["--allocation_strategy=cxl", "--memory_allocator=cachelib"],
)
def test_choices_that_are_not_here(argument: str) -> None:
    assert refusal(argument).startswith(f"{argument} needs ")


@pytest.mark.parametrize("strategy", ["random", "free_ratio_first", "local_first", "ssd_free_ratio_first"])
def test_choices_that_are_here(strategy: str) -> None:
    assert settings(f"--allocation_strategy={strategy}").values["allocation_strategy"] == strategy


def test_settings_of_a_capability_that_is_switched_off() -> None:
    found = settings("--noenable_ha", "--etcd_endpoints=http://localhost:2379")
    assert found.notes == ["--etcd_endpoints=http://localhost:2379 has no effect while enable_ha is off."]


def test_flags_without_effect_are_told() -> None:
    found = settings("--rpc_thread_num=4", "--norpc_enable_tcp_no_delay")
    assert found.max_threads == 4
    assert len(found.notes) == 2
    assert all("has no effect" in note for note in found.notes)


@pytest.mark.parametrize("argument", ["--help", "-help", "--helpshort", "-h"])
def test_help(argument: str) -> None:
    assert parse_command_line([argument]).wants_help


def test_help_lists_every_flag_with_its_default() -> None:
    lines = help_text().splitlines()
    for flag in FLAGS:
        (line,) = [line for line in lines if line.startswith(f"    -{flag.name} ")]
        assert line.endswith(f"default: {flag.default_text}")


def test_version() -> None:
    assert parse_command_line(["--version"]).wants_version


def documented(flag: Flag) -> str:
    """The flag's row in docs/configuration.md."""
    remark = ""
    if flag.lacks:
        remark = f" *Not here yet: {flag.lacks.name}.*"
    elif flag.inert:
        remark = f" *No effect: {flag.inert}.*"
    elif flag.choices:
        remark = " One of " + ", ".join(
            f"`{choice}` (not here yet)" if choice in flag.lacks_choice else f"`{choice}`" for choice in flag.choices
        )
        remark += "."
    name = f"`{flag.name}`" + (f" (file: `{flag.field}`)" if flag.field != flag.name else "")
    return f"| {name} | {flag.kind.value} | `{flag.default_text}` | {flag.text}.{remark} |"


def test_the_documented_table_is_the_real_one() -> None:
    rows = [
        line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if re.match(r"\| `\w+`.*\|.*\|.*\|", line)
    ]
    rows = [row for row in rows if row.split("|")[2].strip() in {kind.value for kind in Kind}]
    assert rows == [documented(flag) for flag in FLAGS]
