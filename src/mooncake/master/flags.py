"""The master's settings: gflags' command line, then the config file, then defaults, checked as a whole.

`read_settings` is the way in.  Every mistake is one sentence (`errors.ConfigError`) that names the flag or the
file's field.  A setting of a capability that this version lacks is refused, unless its value is the default or
the capability's own switch is given and off (then a note says that it has no effect): nothing is ignored silently.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mooncake.config_text import parse_bool, parse_duration_ms, shown
from mooncake.errors import ConfigError
from mooncake.master.config_file import read_config_file
from mooncake.master.flag_table import BY_NAME, FLAGS, Capability, Flag, Kind, Value

HELP_NAMES = frozenset({"help", "h", "helpfull", "helpshort"})


class Settings(NamedTuple):
    """Every flag's value, and sentences about given settings that have no effect here."""

    values: Mapping[str, Value]
    notes: Sequence[str]

    @property
    def rpc_port(self) -> int:
        return int(self.values["rpc_port"] or self.values["port"])

    @property
    def max_threads(self) -> int:
        """The figure the start-up line shows; no thread is started for it."""
        return int(self.values["rpc_thread_num"] or min(int(self.values["max_threads"]), os.cpu_count() or 1))


class CommandLine(NamedTuple):
    """`values` of the flags given, by name, and how each was `written`."""

    values: dict[str, Value]
    written: dict[str, str]
    wants_help: bool
    wants_version: bool


def read_settings(command_line: CommandLine) -> Settings:
    """Defaults, overlaid by the config file, overlaid by the command line.  Raises ConfigError."""
    values: dict[str, Value] = {flag.name: flag.default for flag in FLAGS}
    written: dict[str, str] = {}
    path = str(command_line.values.get("config_path", ""))
    if path:
        from_file = read_config_file(path)
        values |= from_file
        written |= {name: f"{BY_NAME[name].field}={shown(value)} in {path}" for name, value in from_file.items()}
    values |= command_line.values
    written |= command_line.written
    notes = [note for name in written for note in _effect(BY_NAME[name], values, written)]
    if int(values["default_kv_soft_pin_ttl"]) > int(values["max_kv_soft_pin_ttl"]):
        raise ConfigError(
            f"default_kv_soft_pin_ttl ({values['default_kv_soft_pin_ttl']} ms) must not exceed "
            f"max_kv_soft_pin_ttl ({values['max_kv_soft_pin_ttl']} ms)."
        )
    if values["enable_kv_events"] and not (values["kv_events_bind_endpoint"] and values["kv_events_backend_id"]):
        notes.append("enable_kv_events has no effect without both kv_events_bind_endpoint and kv_events_backend_id.")
    return Settings(values, notes)


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """gflags' forms: --name=value, --name value, --flag, --noflag, each with one dash or two.  The last one of a
    name counts.  Raises ConfigError."""
    values: dict[str, Value] = {}
    written: dict[str, str] = {}
    wants_help = wants_version = False
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument.strip("-") == "":
            raise ConfigError(
                f"The argument {shown(argument)} is not a flag: flags are written --name=value, "
                f"and truth values --name or --noname; --help lists them."
            )
        name, equals, text = argument.removeprefix("-").removeprefix("-").partition("=")
        if not equals and name in HELP_NAMES:
            wants_help = True
            continue
        if not equals and name == "version":
            wants_version = True
            continue
        flag = BY_NAME.get(name)
        negated = BY_NAME.get(name.removeprefix("no")) if flag is None and not equals else None
        if negated is not None and negated.kind is Kind.BOOL:
            flag, text = negated, "false"
        elif flag is None:
            raise ConfigError(_unknown(name))
        elif not equals and flag.kind is Kind.BOOL:
            text = "true"
        elif not equals:
            following = next(rest, None)
            if following is None:
                raise ConfigError(f"The flag --{name} lacks its value: write --{name}={flag.default_text}, say.")
            text = following
        try:
            values[flag.name] = _parse(flag, text)
        except ValueError as error:
            raise ConfigError(f"The flag --{flag.name} is wrong: {error}.") from None
        written[flag.name] = f"--{flag.name}={text}"
    return CommandLine(values, written, wants_help, wants_version)


def help_text() -> str:
    """All flags with their types and defaults, and what this version does not do."""
    lines = ["mooncake_master [--name=value ...]: the master of a KV-cache pool.", ""]
    for flag in FLAGS:
        remark = ""
        if flag.lacks:
            remark = f"; not here yet: {flag.lacks.name}"
        elif flag.inert:
            remark = f"; no effect here: {flag.inert}"
        elif flag.choices:
            remark = "; one of " + ", ".join(
                f"{choice} (not here yet)" if choice in flag.lacks_choice else choice for choice in flag.choices
            )
        lines.append(f"    -{flag.name} ({flag.text}{remark}) type: {flag.kind.value} default: {flag.default_text}")
    lines += [
        "    -help (Show this text) type: bool default: false",
        "    -version (Show the version) type: bool default: false",
        "",
        "Flags of what is not here yet are accepted at their defaults and refused otherwise.",
        "In the config file client_ttl is called client_live_ttl_sec; all other names are the same.",
    ]
    return "\n".join(lines)


def _parse(flag: Flag, text: str) -> Value:
    """The value of a flag's text.  Raises ValueError "expected ..."."""
    if flag.kind is Kind.BOOL:
        return parse_bool(text)
    if flag.kind is Kind.STRING:
        return flag.check(text)
    if flag.kind is Kind.DURATION:
        return flag.check(parse_duration_ms(text))
    try:
        return flag.check(float(text) if flag.kind is Kind.DOUBLE else int(text))
    except ValueError:
        raise ValueError(f"expected {flag.wanted}, but found {shown(text)}") from None


def _effect(flag: Flag, values: Mapping[str, Value], written: Mapping[str, str]) -> list[str]:
    """Notes about a given setting; raises ConfigError if it asks for what this version lacks."""
    value = values[flag.name]
    if value == flag.default:
        return []
    lacks = flag.lacks or flag.lacks_choice.get(str(value))
    if flag.switches and not any(values[switch] for switch in flag.switches):
        are = "is" if len(flag.switches) == 1 else "are"
        return [f"{written[flag.name]} has no effect while {' and '.join(flag.switches)} {are} off."]
    if lacks is None:
        return [f"{written[flag.name]} has no effect: {flag.inert}."] if flag.inert else []
    if _switched_off(lacks, flag, values, written):
        return [f"{written[flag.name]} has no effect while {lacks.switch} is off."]
    available = [choice for choice in flag.choices if choice not in flag.lacks_choice]
    instead = f"use {' or '.join(available)}" if available else f"leave {flag.name} at its default, {flag.default_text}"
    raise ConfigError(
        f"{written[flag.name]} needs {lacks.name}, which this version of mooncake-py does not have yet: {instead}."
    )


def _switched_off(lacks: Capability, flag: Flag, values: Mapping[str, Value], written: Mapping[str, str]) -> bool:
    """Whether the user has said that the capability is not wanted, so that its other settings do no harm."""
    switch = lacks.switch
    return bool(switch) and switch != flag.name and switch in written and values[switch] == BY_NAME[switch].default


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    similar = get_close_matches(name.replace("-", "_"), BY_NAME, n=1)
    hint = f" (did you mean --{similar[0]}?)" if similar else ""
    return f"The flag --{name} is unknown{hint}; --help lists all flags."
