"""The processes of a run: masters, segment servers and engines.  All end with it, whatever happens."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from benchmarks.gpu import configurations
from benchmarks.gpu.configurations import GIB, Configuration
from mooncake.cli.loopback import accepts, free_ports

ROOT = Path(__file__).parents[2]
_END_LIMIT = 20.0


class Failed(RuntimeError):
    """An engine could not do what it was told; the message says why."""


class Clock:
    """The time that a run may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


class Engine:
    """An instance in its own process.  Methods of `instance.Instance` are called by name."""

    def __init__(self, configuration: Configuration, argv: list[str], environment: dict[str, str], log: Path) -> None:
        self.configuration = configuration
        self.name = configuration.name
        self.log = log
        self.facts: dict[str, Any] = {}
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, env=environment, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip
        self._text = b""

    def ready(self, limit: float) -> None:
        self.facts = self._answer(limit)

    def call(self, method: str, limit: float, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([method, arguments]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Failed(f"{self.name} has ended: {self.last_lines()}") from None
        return self._answer(limit)

    def last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line] or lines
        return "\n    ".join(["", *errors[-6:], f"({self.log.name})"])

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_LIMIT)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its session: the engine's process too
        self._process.wait()

    def _answer(self, limit: float) -> Any:
        assert self._process.stdout is not None
        end = time.monotonic() + limit
        while b"\n" not in self._text:
            if not select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise Failed(f"{self.name} did not answer within {limit:.0f} s: {self.last_lines()}")
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                raise Failed(f"{self.name} has ended: {self.last_lines()}")
            self._text += part
        line, _, self._text = self._text.partition(b"\n")
        return json.loads(line)


class Services:
    """Starts what the chosen configurations need, each pool with a master of its own."""

    def __init__(self, folder: Path, work: Path, options: Any) -> None:
        """`folder`: for logs.  `work`: for files that nobody reads afterwards."""
        self._folder, self._work, self._options = folder, work, options
        self._stack = ExitStack()
        self._masters: dict[str, int] = {}
        self._count = 0
        self._log_settings = configurations.log_settings(work, trace=options.trace)
        self._out = self._stack.enter_context((folder / "services.log").open("ab"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def engine(self, configuration: Configuration) -> Engine:
        """Starts it; it is not waited for."""
        self._count += 1
        pool = None
        if configuration.pool:
            pool = configurations.pool_file(self._work, configuration, self._master(configuration), self._options)
        log = self._folder / f"{configuration.name}.log"
        argv = [
            self._options.python, "-m", "benchmarks.gpu.instance",
            json.dumps(configurations.arguments(configuration, self._count, self._options)),
        ]  # fmt: skip
        environment = configurations.environment(configuration, pool, self._log_settings, self._options)
        engine = Engine(configuration, argv, environment, log)
        self._stack.callback(engine.end)
        return engine

    def _master(self, configuration: Configuration) -> int:
        port = self._masters.get(configuration.pool)
        if port is not None:
            return port
        port, metrics, client = free_ports(3)
        if configuration.package == "peer":
            if self._options.peer is None:
                raise Failed(f"{configuration.name} needs the peer's package: pass --peer or set MOONCAKE_PEER")
            argv = [str(Path(self._options.peer) / "mooncake" / "mooncake_master"), "--default_kv_lease_ttl=5000"]
        else:
            argv = [sys.executable, "-c", "from mooncake.cli.master import main; main()", "--rpc_address=127.0.0.1"]
            argv += ["--metrics_host=127.0.0.1"]
        self._start([*argv, f"--rpc_port={port}", f"--metrics_port={metrics}"], port)
        if configuration.pool == "server":
            code = "from mooncake.cli.client import main; main()"
            size = int(self._options.pool_gib * GIB)
            flags = ["--host=127.0.0.1", f"--master_server_address=127.0.0.1:{port}", f"--global_segment_size={size}",
                     "--enable_http_server=true", f"--http_port={client}"]  # fmt: skip
            self._start([sys.executable, "-c", code, *flags], client)
        self._masters[configuration.pool] = port
        return port

    def _start(self, argv: list[str], port: int) -> None:
        try:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._out)
        except OSError as error:
            raise Failed(f"{argv[0]} does not start: {error.strerror}") from None
        self._stack.callback(_end, process)
        end = time.monotonic() + 20
        while not accepts(port):
            if process.poll() is not None or time.monotonic() > end:
                raise Failed(f"{' '.join(argv)} does not listen at {port}; services.log says why")
            time.sleep(0.05)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_END_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
