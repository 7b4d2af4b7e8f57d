"""Processes in which the code of other projects runs, unmodified, on this package."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.servers import vllm_python
from tests.processes import gone, wait_until

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".cache" / "clients"


# The order matters: stand-ins that one needs must not come between others and what they import.
MODULES = {
    "vllm": ["vllm_encoder_cache"],
    "lmcache": ["lmcache_pool"],
    "sglang": ["sglang_hicache", "sglang_linker", "sglang_transfer"],
}


class Clients:
    """The clients' packages, as far as they are there, imported by one zygote; see zygote.py."""

    def __init__(self, folder: Path) -> None:
        python = vllm_python()
        if python is None:
            pytest.skip("there is no vLLM environment; `scripts/install --vllm` makes it")
        self._folder, self._count = folder, 0
        modules = [module for package in MODULES if not missing(package) for module in MODULES[package]]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{CLIENTS}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        log = folder / "zygote.log"
        with log.open("wb") as errors:
            self._zygote = subprocess.Popen(
                [python, "-m", "tests.clients.zygote", *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )
        assert self._zygote.stdout.readline() == "ready\n", log.read_text()[-6000:]

    def start(self, call: str, environment: dict[str, str] | None = None, **arguments: object) -> "Process":
        """A process that calls a function; `call`: module and function, with a dot between."""
        self._count += 1
        log = self._folder / f"{self._count}-{call}.txt"
        module, _, function = call.partition(".")
        request = {
            "module": module,
            "function": function,
            "arguments": arguments,
            "environment": environment or {},
            "log": str(log),
            "result": str(log.with_suffix(".json")),
        }
        self._zygote.stdin.write(json.dumps(request) + "\n")
        self._zygote.stdin.flush()
        return Process(int(self._zygote.stdout.readline()), log)

    def run(self, call: str, environment: dict[str, str] | None = None, **arguments: object):
        """What the function returns in a process of its own."""
        return self.start(call, environment, **arguments).result()

    def close(self) -> None:
        self._zygote.kill()  # its forks die with it
        self._zygote.wait()
        self._zygote.stdin.close()
        self._zygote.stdout.close()


class Process:
    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self._log = log

    def wait(self, limit: float = 40) -> None:
        """Until it has ended, somehow."""
        try:
            wait_until(lambda: gone(self.pid), limit, f"the end of {self._log.stem}")
        except AssertionError:
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"{self._log.stem} hangs\n{self.output}") from None

    def result(self, limit: float = 40):
        """What the function has returned."""
        self.wait(limit)
        try:
            return json.loads(self._log.with_suffix(".json").read_text())
        except OSError:
            raise AssertionError(self.output) from None

    def kill(self) -> None:
        if not gone(self.pid):
            os.kill(self.pid, signal.SIGKILL)

    @property
    def output(self) -> str:
        return self._log.read_text()[-6000:]


def missing(package: str) -> str:
    """Why this machine has no copy of a client's package, "" if it has one.  vLLM's is that of its environment."""
    if package == "vllm" or (CLIENTS / package).is_dir():
        return ""
    try:
        reason = (CLIENTS / "unavailable").read_text()
    except OSError:
        reason = "`scripts/install --vllm` fetches it"
    return f"there is no {package} here: {reason}"
