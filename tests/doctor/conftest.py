import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import BIN

STUB = Path(__file__).with_name("stub_instance.py")
_OURS = ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER", "MOONCAKE_MASTER_METRICS_PORT", "PYTHONHASHSEED")


def clean_environment(**variables: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name not in _OURS}, **variables}


class StubInstance:
    def __init__(self, flags, variables, stub) -> None:
        argv = [sys.executable, str(STUB), "vllm", "--port", "0", "--model", "/models/tiny", "--stub", json.dumps(stub)]
        self.process = subprocess.Popen(
            [*argv, *flags], env=clean_environment(**variables), stdout=subprocess.PIPE, text=True
        )
        # As for any vLLM, the port stands in the URL and not in our knowledge of the flag.
        self.port = int(self.process.stdout.readline())
        self.name = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.name}"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def instance(cleanup):
    """Starts a stub instance: vLLM's flags, environment variables, and what its routes tell."""

    def start(*flags: str, variables: dict[str, str] | None = None, **stub) -> StubInstance:
        one = StubInstance(flags, variables or {}, stub)
        cleanup.callback(one.stop)
        return one

    return start


class Report:
    def __init__(self, process: subprocess.CompletedProcess) -> None:
        self.code = process.returncode
        self.text = process.stdout
        assert process.stderr == ""
        self.findings = json.loads(process.stdout)["findings"]
        assert json.loads(process.stdout)["ok"] == (self.code == 0)

    def all(self, subject: str) -> list[dict]:
        return [one for one in self.findings if subject in one["subject"]]

    def one(self, subject: str, status: str) -> dict:
        found = [one for one in self.all(subject) if one["status"] == status]
        assert len(found) == 1, self.text
        return found[0]

    def failed(self) -> list[str]:
        return [one["subject"] for one in self.findings if one["status"] == "fail"]


@pytest.fixture
def doctor():
    """Runs `mooncake doctor --json`."""

    def run(*arguments, **variables: str) -> Report:
        command = [str(BIN / "mooncake"), "doctor", "--json", *map(str, arguments)]
        return Report(
            subprocess.run(
                command, capture_output=True, text=True, timeout=60, env=clean_environment(**variables), check=False
            )
        )

    return run


@pytest.fixture
def examine(doctor):
    """The doctor's report on these instances."""
    return lambda *instances: doctor(*(word for one in instances for word in ("--instance", one.url)))
