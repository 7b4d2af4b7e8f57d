"""The real `mooncake_conductor` as a process."""

import os
import signal
import subprocess

from tests.processes import BIN, free_port, wait_until
from tests.proxy.processes import http


class Conductor:
    def __init__(self, *flags: str, port: int = 0, **environment: str) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [BIN / "mooncake_conductor", f"--port={self.port}", *flags],
            env={**os.environ, "CONDUCTOR_LOG_LEVEL": "WARNING", **environment},
        )
        wait_until(self._answers, what="the conductor")

    def _answers(self) -> bool:
        assert self.process.poll() is None
        try:
            return http(self.url + "/health")[0] == 200
        except OSError:
            return False

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGINT)
            assert self.process.wait(10) == 0

    def post(self, path: str, **body):
        """(status, answer)"""
        status, _, answer = http(self.url + path, body)
        return status, answer

    def register(self, name: str, publisher, size: int = 4, **more) -> None:
        """`publisher`: or the address of one without replay."""
        where = {"endpoint": getattr(publisher, "endpoint", publisher)}
        where["replay_endpoint"] = getattr(publisher, "replay_endpoint", "")
        status, answer = self.post(
            "/register", **{**where, "type": "vLLM", "modelname": "m", "instance_id": name, "block_size": size, **more}
        )
        assert (status, answer) == (200, {"status": "registered successfully", "instance_id": name})
        if hasattr(publisher, "wait_for_subscriber"):
            publisher.wait_for_subscriber()

    def instances(self) -> list[dict]:
        return http(self.url + "/status")[2]["instances"]

    def instance(self, name: str) -> dict:
        return next(one for one in self.instances() if one["instance_id"] == name)

    def query(self, tokens: list[int], model: str = "m", **more) -> dict:
        """Matches by instance."""
        status, answer = self.post("/query", model=model, token_ids=tokens, **more)
        assert status == 200, answer
        return answer[more.get("tenant_id", "default")]

    def longest(self, tokens: list[int], **more) -> dict[str, int]:
        return {name: found["longest_matched"] for name, found in self.query(tokens, **more).items()}

    def wait_longest(self, tokens: list[int], wanted: dict[str, int], **more) -> None:
        wait_until(lambda: self.longest(tokens, **more) == wanted, 10, f"{wanted}")
