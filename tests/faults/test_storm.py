"""Storms: many clients on few keys in a pool that is too small, while processes are killed, stopped and restarted.

Every value says what it is (see storm_client).  The seed decides what happens in which order; the machine, when.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.invariants.baseline import pool_excess, settle
from tests.processes import SETUP, Worker, children, stop, wait_until

MIB = 1 << 20
CLIENT = "tests.faults.storm_client"
FLAGS = ("--default_kv_lease_ttl=500", "--put_start_discard_timeout_sec=1", "--put_start_release_timeout_sec=3")


class Storm:
    """What runs, and what can happen to it."""

    def __init__(self, seed: int, seconds: float, master, folder: Path, cleanup):
        self.rng = random.Random(seed)
        self._seed, self._folder, self._cleanup = seed, folder, cleanup
        self.end = time.monotonic() + seconds
        self.master = master
        self.reports: list[tuple[subprocess.Popen, Path]] = []
        self.owners = [self._owner() for _ in range(2)]
        self.clients = [self._client() for _ in range(4)]

    def _owner(self) -> Worker:
        worker = Worker()
        self._cleanup.callback(worker.close)
        names = {"host": "127.0.0.1", "segment": 12 * MIB, "buffer": MIB, "master": self.master.address}
        wait_until(lambda: worker(SETUP, **names) == 0, 10, "setup")
        return worker

    def _client(self) -> subprocess.Popen:
        number = len(self.reports)
        report = self._folder / f"report{number}"
        seconds = max(0.5, self.end - time.monotonic())
        arguments = [self.master.address, self._seed * 1000 + number, seconds, report, 250, 2 * MIB]
        client = subprocess.Popen(
            [sys.executable, "-m", CLIENT, *map(str, arguments)],
            env={**os.environ, "MC_FORCE_TCP": self.rng.choice(("", "1"))},
            stderr=subprocess.DEVNULL,
        )
        self._cleanup.callback(client.wait)
        self._cleanup.callback(client.kill)
        self.reports.append((client, report))
        return client

    def client_killed(self) -> None:
        i = self.rng.randrange(len(self.clients))
        self.clients[i].kill()
        self.clients[i].wait()
        self.clients[i] = self._client()

    def client_stopped(self) -> None:
        self._stopped(self.rng.choice(self.clients).pid, 1.6)

    def server_killed(self) -> None:
        i = self.rng.randrange(len(self.owners))
        os.kill(children(self.owners[i].pid)[0], signal.SIGKILL)
        self.owners[i].close()
        self.owners[i] = self._owner()

    def server_stopped(self) -> None:
        self._stopped(children(self.rng.choice(self.owners).pid)[0], 1.5)

    def master_killed(self) -> None:
        self.master.kill()
        time.sleep(self.rng.uniform(0, 0.3))
        self.master.start()

    def master_stopped(self) -> None:
        self._stopped(self.master.process.pid, 1.4)

    def _stopped(self, pid: int, longest: float) -> None:
        stop(pid)
        try:
            time.sleep(self.rng.uniform(0.05, longest))
        finally:
            os.kill(pid, signal.SIGCONT)

    def rage(self, what: tuple[str, ...]) -> None:
        while time.monotonic() < self.end - 1:
            time.sleep(self.rng.uniform(0.1, 0.6))
            getattr(self, self.rng.choice(what))()


EVERYTHING = ("client_killed", "client_stopped", "server_killed", "server_stopped", "master_killed", "master_stopped")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "what"),
    [
        (1, EVERYTHING),
        (2, ("client_killed", "client_stopped", "master_killed")),
        (3, ("server_killed", "server_stopped", "client_stopped")),
    ],
    ids=["everything", "clients and master", "servers"],
)
def test_bytes_are_right_calls_end_and_space_comes_back(make_master, cleanup, make_store, tmp_path, seed, what):
    master = make_master(*FLAGS)
    storm = Storm(seed, 12, master, tmp_path, cleanup)
    storm.rage(what)
    for client in storm.clients:
        client.wait(20)
    heard = 0
    for client, path in storm.reports:
        if client.returncode == -signal.SIGKILL:
            continue
        report = json.loads(path.read_text())
        assert not report["wrong"]
        assert max(report["slowest"].values()) < 9  # a stop of its own, a tcp stall of 5 s, the master's second
        heard += sum(report["codes"].values())
    assert heard > 500
    wait_until(lambda: len(master.get("/get_all_segments").split()) == 2, 15, "both segments are mounted")
    store = make_store(0, at=master)
    assert store.remove_all(force=True) >= 0
    assert settle(lambda: pool_excess(master), 6) == []
