"""Real processes for tests: a master, and Python processes that are told what to run.  All end with the test."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until(condition, limit: float = 10.0, what: str = "the condition"):
    """Poll until true; the last value."""
    end = time.monotonic() + limit
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"{what} did not come true within {limit} s"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Process ids of the living children of `pid`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid and fields[0] != "Z":
                    found.append(int(entry))
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it has stopped: on a busy machine its threads run on for a while."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(
        lambda: all(
            task.read_text().rpartition(")")[2].split()[0] == "T" for task in Path(f"/proc/{pid}/task").glob("*/stat")
        ),
        what="the stop",
    )


class Master:
    """A `mooncake_master` on free loopback ports."""

    def __init__(
        self, *flags: str, log: Path | None = None, prefix: list[str] | None = None, address: str = "127.0.0.1"
    ):
        self.port, self.metrics_port = free_port(), free_port()
        self.host = address
        self.address = f"{address}:{self.port}"
        self._flags, self._log, self._prefix = flags, log, prefix or []
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        argv = [
            *self._prefix,
            str(BIN / "mooncake_master"),
            f"--rpc_port={self.port}",
            f"--rpc_address={self.host}",
            f"--metrics_port={self.metrics_port}",
            f"--metrics_host={self.host}",
            *self._flags,
        ]
        out = open(self._log, "ab") if self._log else subprocess.DEVNULL  # noqa: SIM115
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        if not self._prefix:
            try:
                wait_until(self.answers, what="the master's port")
            except BaseException:
                self.kill()
                raise

    def answers(self) -> bool:
        assert self.process.poll() is None, "the master ended at once"
        with socket.socket() as s:
            s.settimeout(0.5)
            return s.connect_ex((self.host, self.port)) == 0

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def get(self, path: str) -> str:
        """Body of an admin route."""
        return wait_until(lambda: _try_get(f"http://{self.host}:{self.metrics_port}{path}"), what=path)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """(status, decoded JSON) of an admin route."""
        data = None if body is None else json.dumps(body).encode()
        url = f"http://{self.host}:{self.metrics_port}{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data=data, method=method), timeout=5) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def metric(self, name: str) -> float:
        for line in self.get("/metrics").splitlines():
            if line.startswith((name + " ", name + "{")):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")


def _try_get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.read().decode() or "\n"
    except OSError:
        return None


class Worker:
    """A Python process that runs the code it is sent; variables live on between calls."""

    def __init__(
        self, prefix: list[str] | None = None, env: dict[str, str] | None = None, python: str = sys.executable
    ):
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self.process = subprocess.Popen(
            [*(prefix or []), python, "-c", _WORKER, str(theirs_in), str(theirs_out)],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "w"), os.fdopen(ours_in)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, code: str, **names) -> None:
        self._out.write(json.dumps([code, names]) + "\n")
        self._out.flush()

    def receive(self):
        line = self._in.readline()
        if not line:
            raise EOFError(f"the worker ended with {self.process.wait()}")
        ok, value = json.loads(line)
        if not ok:
            raise AssertionError(value)
        return value

    def __call__(self, code: str, **names):
        """Run statements; the value of the variable `result` (JSON) afterwards."""
        self.send(code, **names)
        return self.receive()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._out.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._in.close()


_WORKER = """
import json, os, sys, traceback
space = {"__name__": "worker"}
with os.fdopen(int(sys.argv[1])) as commands, os.fdopen(int(sys.argv[2]), "w") as answers:
    for line in commands:
        code, names = json.loads(line)
        space.update(names, result=None)
        try:
            exec(code, space)
            answer = [True, space["result"]]
        except BaseException:
            answer = [False, traceback.format_exc()]
        answers.write(json.dumps(answer) + "\\n")
        answers.flush()
if "store" in space:
    space["store"].close()
"""

SETUP = """
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
store = MooncakeDistributedStore()
result = store.setup(host, "P2PHANDSHAKE", segment, buffer, "tcp", "", master)
"""
