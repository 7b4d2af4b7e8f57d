"""Real vLLM servers for tests, forked from one zygote."""

import http.client
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mooncake.cli.engine_settings import cpu_engine_arguments
from mooncake.cli.loopback import HOST, fetch, free_ports, metric
from tests.processes import gone, wait_until

HERE = Path(__file__).parent
BLOCK = 32  # tokens
KV_CACHE_SIZE = 64 << 20  # bytes


class Zygote:
    """Forks servers; see zygote.py."""

    def __init__(self, python: Path, log: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-")  # for sockets, whose paths must be short
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TMPDIR": self._folder.name,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, HERE / "zygote.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )
        assert self._process.stdout.readline() == "ready\n", log.read_text()

    def fork(self, argv: list[str], environment: dict[str, str], log: Path) -> int:
        request = {"argv": argv, "environment": environment, "log": str(log)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)
        self._folder.cleanup()


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    from_pool: int  # prompt tokens


class Server:
    """One vLLM instance."""

    def __init__(
        self,
        zygote: Zygote,
        name: str,
        model: Path,
        folder: Path,
        transfer: str = "",
        environment: Mapping[str, str] | None = None,
        *more: str,
    ) -> None:
        """`transfer`: the JSON text for --kv-transfer-config; `more`: further arguments."""
        (self.port,) = free_ports(1)
        self.url = f"http://{HOST}:{self.port}"
        self.log = folder / f"{name}.log"
        self._environment = {"VLLM_HOST_IP": HOST, **(environment or {})}
        self.bootstrap_port = int(self._environment.get("VLLM_MOONCAKE_BOOTSTRAP_PORT", 0))
        self._argv = cpu_engine_arguments(
            model,
            "tiny",
            self.port,
            max_model_len=4096,
            block_size=BLOCK,
            kv_cache_size=KV_CACHE_SIZE,
            transfer=transfer,
        )
        self._argv += more
        self._zygote = zygote
        self.start()

    def start(self) -> None:
        """Also again, after it was killed: on the same ports, with a new engine id.  Not waited for."""
        self.pid = self._zygote.fork(self._argv, self._environment, self.log)

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert not gone(self.pid), self.log.read_text()[-4000:]
            return fetch(self.port, "/health") is not None

        wait_until(ready, 90, f"{self.log.name}: ready")

    def ask(self, prompt: list[int], tokens: int = 12) -> Answer:
        """A greedy completion of `prompt`, and how much of that was loaded from the pool."""
        before = self.loaded()
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        assert answer.status == 200, f"{text}\n{self.log.read_text()[-4000:]}"
        return Answer(json.loads(text)["choices"][0]["token_ids"], self.loaded() - before)

    def post(self, path: str) -> int:
        """The status of an answer without a body."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        try:
            connection.request("POST", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def loaded(self) -> int:
        return int(self.metric("vllm:external_prefix_cache_hits_total"))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels."""
        text = fetch(self.port, "/metrics", timeout=10)
        assert text is not None, self.log.read_text()[-4000:]
        return metric(text, name, **labels)

    def signal(self, number: int) -> None:
        """To the server and its engine's process."""
        os.killpg(self.pid, number)

    def stop(self) -> None:
        if not gone(self.pid):
            self.signal(signal.SIGINT)
            try:
                wait_until(lambda: gone(self.pid), 30, f"{self.log.name}: end after SIGINT")
            except AssertionError:
                self.signal(signal.SIGKILL)
                raise


def vllm_python() -> Path | None:
    """The interpreter of the environment that `scripts/install --vllm` makes."""
    root = HERE.parent.parent
    python = root / ".cache" / "vllm" / "bin" / "python"
    return python if python.exists() else None
