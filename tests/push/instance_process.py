"""An instance in a process of its own, which may be stopped and killed: `RemoteInstance` starts and tells it.

    python -m tests.push.instance_process ROLE HOST LIMIT PORT

Reads JSON lists from stdin, [method of Instance, arguments...], and answers each with a line; ends with its input.
"""

import contextlib
import json
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.push.instances import LIMIT, Instance, known


class RemoteInstance:
    """Its `host`, `port` and `engine` are what a decode instance needs to know of it."""

    def __init__(
        self, role: str, host: str = "127.0.0.1", limit: int = LIMIT, port: int = 0, prefix: Sequence[str] = ()
    ) -> None:
        """`prefix`: what comes before the command, as on another host; `port` 0: any."""
        command = [*prefix, sys.executable, "-m", "tests.push.instance_process", role, host, str(limit), str(port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.host = host
        self.port, self.engine = self.hear()

    def do(self, *command: Any) -> Any:
        self.tell(*command)
        return self.hear()

    def tell(self, *command: Any) -> None:
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    def hear(self, limit: float = 60.0) -> Any:
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        assert ready, f"the instance has not answered in {limit} s"
        line = self.process.stdout.readline()
        assert line, "the instance has ended"
        return json.loads(line)

    def pull(self, name: str, transfer: str, of: "RemoteInstance", blocks: list[int]) -> None:
        self.do("pull_from", name, transfer, [of.host, of.port, of.engine], blocks)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


class _Commanded(Instance):
    def pull_from(self, name: str, transfer: str, of: list[Any], blocks: list[int]) -> None:
        self.pull(name, transfer, SimpleNamespace(host=of[0], port=of[1], engine=of[2]), blocks)

    def result(self, name: str) -> int | None:
        """Blocks that came, from the first; -1: all; None: it still waits."""
        return self.failed.get(name, -1) if self.has(name) else None

    def compute_called(self, name: str, blocks: list[int], called: int, first: int, end: int) -> None:
        self.compute(name, blocks, first, end, called=called)

    def wrong(self, blocks: list[int], called: int) -> str:
        """Why these are not the blocks called so; "" if they are."""
        try:
            self.check(blocks, called - 1)
        except AssertionError as error:
            return f"not block {called}: {str(error).splitlines()[0]}"
        return ""

    def take(self, blocks: list[int], called: int) -> None:
        """They are somebody else's now, and called so."""
        for memory in self.memories:
            for i, block in enumerate(blocks):
                memory.fill(block, called + i)


def main() -> None:
    role, host, limit, port = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with contextlib.ExitStack() as stack:
        instance = _Commanded(stack, role, limit=limit, host=host, port=port)
        if role == "prefill":
            known(instance)
        print(json.dumps([instance.port, instance.engine]), flush=True)
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            print(json.dumps(getattr(instance, method)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
