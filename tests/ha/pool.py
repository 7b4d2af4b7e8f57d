"""Several masters of one pool, and what tests ask of all of them."""

import json
import time
import urllib.request
from pathlib import Path

from tests.ha.backends import Backend
from tests.processes import Master, wait_until

LEASE = 5.0  # seconds


class Pool:
    def __init__(self, backend: Backend, folder: Path) -> None:
        self.backend = backend
        self.folder = folder
        self.masters: list[Master] = []

    def add_master(self, *flags: str, backend: Backend | None = None) -> Master:
        flags = (*(backend or self.backend).flags, *flags)
        master = Master(*flags, log=self.folder / f"master-{len(self.masters)}.log")
        self.masters.append(master)
        return master

    def log(self, master: Master) -> str:
        return (self.folder / f"master-{self.masters.index(master)}.log").read_text()

    def leaders(self) -> list[Master]:
        return [master for master in self.masters if health(master).get("role") == "leader"]

    def leader(self, limit: float = 15.0, but: Master | None = None) -> Master:
        """Who leads; waits until somebody does."""
        return wait_until(lambda: [one for one in self.leaders() if one is not but], limit, "a leader")[0]

    def standby(self) -> Master:
        (found,) = [one for one in self.masters if health(one).get("role") == "standby"]
        return found

    def stop(self) -> None:
        for master in self.masters:
            master.stop()


def health(master: Master) -> dict:
    """Empty if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{master.metrics_port}/health", timeout=0.5) as answer:
            return json.load(answer)
    except OSError:
        return {}


def seconds_until(condition, limit: float, what: str) -> float:
    started = time.monotonic()
    wait_until(condition, limit, what)
    return time.monotonic() - started
