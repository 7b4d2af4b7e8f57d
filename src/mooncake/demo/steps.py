"""Shows a command's long steps: what is going on, for how long so far, and how long it took."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_BEAT = 15.0  # seconds between signs of life where no terminal shows a spinner


class Steps:
    """Prints one line for every step; while it runs, a spinner, or a line now and then where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        start = time.monotonic()
        with self._spinner(text) if self._console.is_terminal else self._beats(text, start):
            yield
        self._console.print(f"[green]✓[/] {text} [dim]({time.monotonic() - start:.1f} s)[/]", highlight=False)

    @contextmanager
    def _spinner(self, text: str) -> Iterator[None]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            progress.add_task(text, total=None)
            yield

    @contextmanager
    def _beats(self, text: str, start: float) -> Iterator[None]:
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_BEAT):
                self._console.print(f"  {text}: {time.monotonic() - start:.0f} s so far", highlight=False)

        self._console.print(f"  {text} ...", highlight=False)
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
