"""A running `mooncake up`."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

from mooncake.cli.loopback import accepts, fetch, metric
from tests.processes import BIN, children, gone


class Up:
    """A running `mooncake up`, and what it printed."""

    def __init__(self, *arguments: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="up-")  # for what one that is killed leaves behind
        self.process = subprocess.Popen(
            [BIN / "mooncake", "up", "--size", "64MB", *arguments],
            env={**os.environ, "TMPDIR": self._folder.name},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.text = ""
        for line in self.process.stdout:
            self.text += line
            if line.startswith("Ctrl-C"):
                break
        if "Ctrl-C" in self.text:
            self.port, self.metrics_port = (int(self.group(rf"{what}:(\d+)")) for what in (r"master [\d.]+", r"http.*"))
            self.config = Path(self.group(r"MOONCAKE_CONFIG_PATH=(\S+)"))
            self.servers = {
                name: pid
                for pid in children(self.process.pid)
                for name in ("master", "client")
                if f"mooncake.cli.{name}" in Path(f"/proc/{pid}/cmdline").read_text()
            }

    def group(self, pattern: str) -> str:
        return re.search(pattern, self.text)[1]

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Exit code and messages."""
        if number:
            self.process.send_signal(number)
        messages = self.process.communicate(timeout=20)[1]
        return self.process.returncode, messages

    def left_nothing(self) -> None:
        assert all(map(gone, self.servers.values()))
        assert not accepts(self.port)
        assert not self.config.parent.exists()

    def metric(self, name: str) -> float:
        return metric(fetch(self.metrics_port, "/metrics"), name)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate()
        self._folder.cleanup()
