"""gflags' spellings of flags and values, for argparse: one dash or two, and --noflag for false."""

import argparse

from mooncake.config_text import parse_bool, parse_size


def size(text: str) -> int:
    """Type of a flag: bytes, also as "64MB"."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def truth(text: str) -> bool:
    """Type of a flag that is on or off."""
    try:
        return parse_bool(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def spelled(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """The arguments as `parser` knows them."""
    known = {action.dest for action in parser._actions}
    return [_spelled(argument, known) for argument in arguments]


def _spelled(argument: str, known: set[str]) -> str:
    name = argument.lstrip("-").split("=", 1)[0]
    if argument.startswith("-") and name in known:
        return "--" + argument.lstrip("-")
    if argument.startswith("-") and name.startswith("no") and name[2:] in known:
        return f"--{name[2:]}=false"
    return argument
