"""What a run of the demo comes to: figures, and servers that still run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from mooncake.demo.servers import Instance, Master


class Shown(Protocol):
    """The figures of one of the courses."""

    @property
    def complaint(self) -> str:
        """Why the demo did not pass; empty if it did."""

    def write(self, file: Path) -> None: ...

    def show(self, console: Console) -> None: ...


@dataclass(frozen=True)
class Outcome:
    figures: Shown
    master: Master
    invitation: str  # what a user may do with `open_to_questions`
    open_to_questions: tuple[Instance, ...]
