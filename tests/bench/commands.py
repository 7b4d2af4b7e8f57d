"""The command `mooncake bench ...` as a process."""

import os
import signal
import subprocess
from pathlib import Path

from tests.processes import BIN, children

_OURS = ("MODEL", "NUM_PREFILL", "NUM_DECODE", "PREFILL_PORT_BASE", "DECODE_PORT_BASE", "MASTER_PORT")


class Command:
    def __init__(self, *arguments: str | Path, folder: Path | None = None, **variables: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _OURS}
        self.process = subprocess.Popen(
            [str(BIN / "mooncake"), "bench", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**environment, **variables},
        )

    def read_until(self, text: str) -> str:
        """The lines up to one that holds `text`."""
        lines = ""
        for line in self.process.stdout:
            lines += line
            if text in line:
                return lines
        raise AssertionError(f"{text!r} was not printed: {lines}{self.process.stderr.read()}")

    def end(self, number: int = 0, limit: float = 60) -> tuple[int, str, str]:
        """Exit code, and what was (still) printed; after signal `number`, if not 0."""
        if number:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=limit)
        return self.process.returncode, out, err

    def below(self) -> list[int]:
        """Everything that it has started and that lives."""
        found, waiting = [], [self.process.pid]
        while waiting:
            new = children(waiting.pop())
            found += new
            waiting += new
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.communicate()
