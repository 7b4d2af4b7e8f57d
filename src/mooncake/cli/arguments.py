"""argparse with messages as the rest of the package has them: one sentence, no wall of usage."""

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn


def whole(text: str) -> int:
    """For `type=`: a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'expected a whole number, but found "{text}"') from None


class Parser(argparse.ArgumentParser):
    """Flags must be written in full; an unknown one is named, with the one that was probably meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """There are no unknown ones: whatever is left over is an error here, where the flags are known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return found, []

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; {self.prog} --help lists all flags.", file=sys.stderr)
        sys.exit(2)

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f'the argument "{argument}" is not expected'
        name = argument.partition("=")[0]
        similar = get_close_matches(name, [flag for action in self._actions for flag in action.option_strings], n=1)
        hint = f" (did you mean {similar[0]}?)" if similar else ""
        return f"the flag {name} is unknown{hint}"
