"""Real vLLM servers for tests, forked from one zygote."""

import http.client
import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mooncake.cli.engine_settings import pool_environment, transfer_config
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
        pool: Path | None,
        role: str,
        transfer: str | None = None,
    ) -> None:
        """`transfer`: JSON of the connector, by default vLLM's own in `role`."""
        (self.port,) = free_ports(1)
        self.log = folder / f"{name}.log"
        argv = [
            *("--model", str(model), "--served-model-name", "tiny"),
            *("--host", HOST, "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"),
            *("--max-model-len", "4096", "--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(KV_CACHE_SIZE)),
            *(("--kv-transfer-config", transfer or transfer_config(self.port, role)) if pool else ()),
        ]
        environment = pool_environment(pool) if pool else {"VLLM_HOST_IP": HOST}
        self.pid = zygote.fork(
            argv, {**environment, "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}, self.log
        )

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
        text = fetch(self.port, "/metrics", timeout=10)
        assert text is not None, self.log.read_text()[-4000:]
        return int(metric(text, "vllm:external_prefix_cache_hits_total"))

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
