"""One step's processes: a master, prefill and decode instances of vLLM, and a proxy in front of them."""

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mooncake.bench.steps import Step
from mooncake.cli.children import Child, Children, own_command
from mooncake.cli.engine_settings import (
    CONSUMER,
    PRODUCER,
    cpu_engine_arguments,
    cpu_environment,
    p2p_and_pool_config,
    p2p_config,
    p2p_environment,
    pool_environment,
    transfer_config,
    write_pool_config,
)
from mooncake.cli.loopback import HOST, fetch, free_ports, metric
from mooncake.demo.servers import Instance, start_master, temporary_files, wait_ready

CONNECTORS = ("both", "p2p", "store")
CPU_BLOCK_SIZE = 32  # tokens; the smallest that vLLM's CPU attention takes

# Where a decode instance's prompt tokens come from: our word, vLLM's metric and its label.
_SOURCES = {
    "prefill": ("vllm:prompt_tokens_cached_by_source_total", "p2p"),
    "pool": ("vllm:prompt_tokens_cached_by_source_total", "external_unspecified"),
    "own cache": ("vllm:prompt_tokens_by_source_total", "local_cache_hit"),
    "computed": ("vllm:prompt_tokens_by_source_total", "local_compute"),
}
_PROXY_LIMIT = 30.0  # seconds until it answers and has found its instances


@dataclass(frozen=True)
class EngineSettings:
    """What every instance of a run has in common.  Sizes in bytes."""

    command: tuple[str, ...]  # that the API server's arguments are appended to
    model: str
    served_name: str
    connector: str  # one of CONNECTORS
    gpus: int  # an instance; 0 on CPUs
    max_model_len: int
    kv_cache_size: int  # on CPUs
    segment_size: int  # that each gives to the pool
    arguments: tuple[str, ...]  # more, for all
    prefill_arguments: tuple[str, ...]
    decode_arguments: tuple[str, ...]
    ready_limit: float  # seconds


@dataclass(frozen=True)
class Ports:
    """Where to begin counting; 0 takes free ones."""

    prefill: int = 0
    decode: int = 0
    master: int = 0
    proxy: int = 0


@dataclass
class Deployment:
    """What runs."""

    url: str = ""  # the proxy's
    master: Child | None = None
    prefill: list[Instance] = field(default_factory=list)
    decode: list[Instance] = field(default_factory=list)
    proxy: Child | None = None

    def stop(self, children: Children) -> None:
        """In the order in which nobody misses anybody."""
        engines = [instance.child for instance in (*self.prefill, *self.decode)]
        for together in ([self.proxy], engines, [self.master]):
            children.stop(*(child for child in together if child))

    def sources(self) -> dict[str, float]:
        """Prompt tokens of the decode instances so far, by where their KV cache came from."""
        found: dict[str, float] = {}
        for instance in self.decode:
            text = fetch(instance.port, "/metrics", timeout=10) or ""
            for source, (name, label) in _SOURCES.items():
                found[source] = found.get(source, 0.0) + metric(text, name, source=label)
        return found


@contextmanager
def deployed(
    children: Children,
    step: Step,
    settings: EngineSettings,
    ports: Ports,
    gpus: tuple[str, ...],
    logs: Path,
    room: Path,
) -> Iterator[Deployment]:
    """Everything started and ready; stopped in the end.

    `logs` keeps the processes' output, `room` is for their temporary files.  Raises ChildFailed, ConfigError.
    """
    running = Deployment()
    try:
        _start(children, running, _Start(step, settings, ports, gpus, logs, room))
        yield running
    finally:
        running.stop(children)


@dataclass(frozen=True)
class _Start:
    step: Step
    settings: EngineSettings
    ports: Ports
    gpus: tuple[str, ...]
    logs: Path
    room: Path


def _start(children: Children, running: Deployment, start: _Start) -> None:
    step, ports, settings = start.step, start.ports, start.settings
    master = start_master(children, start.logs, ports.master)
    running.master = master.child
    pool = start.room / "pool.json"
    write_pool_config(pool, master.port, settings.segment_size)
    free = iter(free_ports(step.instances + step.prefill + 1))  # in one call, so that they differ
    gpus = iter(start.gpus)
    halves: list[str] = []
    for role, count, base, found in (
        (PRODUCER, step.prefill, ports.prefill, running.prefill),
        (CONSUMER, step.decode, ports.decode, running.decode),
    ):
        for number in range(count):
            port = base + number if base else next(free)
            straight = role == PRODUCER and settings.connector != "store"
            bootstrap = next(free) if straight else None
            half = "prefill" if role == PRODUCER else "decode"
            name = f"{half} {number}"
            own = [next(gpus) for _ in range(settings.gpus)]
            instance = _start_instance(children, start, _Role(name, role, port, bootstrap, own), pool)
            found.append(instance)
            bootstraps = [str(bootstrap or "none")] if role == PRODUCER else []
            halves += [f"--{half}", _url(instance), *bootstraps]
    wait_ready(children, *running.prefill, *running.decode, limit=settings.ready_limit)
    port = ports.proxy or next(free)
    command = own_command("mooncake.cli.proxy", "--host", HOST, "--port", str(port), *halves)
    running.proxy = children.start("the proxy", command, start.logs / "proxy.log")
    running.url = f"http://{HOST}:{port}"
    children.wait_ready(running.proxy, lambda: _all_ready(port, step), _PROXY_LIMIT)


@dataclass(frozen=True)
class _Role:
    """What one instance has for itself."""

    name: str
    role: str
    port: int
    bootstrap: int | None
    gpus: list[str]


def _start_instance(children: Children, start: _Start, own: _Role, pool: Path) -> Instance:
    settings = start.settings
    transfer = _transfer(settings.connector, own.role, lookup_port=own.port)
    if settings.gpus:
        arguments = [
            *("--model", settings.model, "--served-model-name", settings.served_name),
            *("--host", HOST, "--port", str(own.port), "--uvicorn-log-level", "warning"),
            *("--max-model-len", str(settings.max_model_len), "--tensor-parallel-size", str(settings.gpus)),
            *("--kv-transfer-config", transfer),
        ]
    else:
        arguments = cpu_engine_arguments(
            Path(settings.model),
            settings.served_name,
            own.port,
            max_model_len=settings.max_model_len,
            block_size=CPU_BLOCK_SIZE,
            kv_cache_size=settings.kv_cache_size,
            transfer=transfer,
        )
    more = settings.prefill_arguments if own.role == PRODUCER else settings.decode_arguments
    if settings.command[-1] == "serve":  # `vllm serve` wants the model as a word by itself
        arguments.remove("--model")
    command = [*settings.command, *arguments, *settings.arguments, *more]
    log = start.logs / f"{own.name.replace(' ', '-')}.log"
    with (start.logs / "commands.txt").open("a") as commands:
        print(f"{own.name}: {shlex.join(command)}", file=commands)
    room = start.room / log.stem
    room.mkdir()
    environment = {**_own_environment(), **_device_environment(start, own.gpus), **temporary_files(room)}
    if settings.connector != "p2p":
        environment |= pool_environment(pool)
    if settings.connector != "store":
        environment |= p2p_environment(own.bootstrap)
    return Instance(own.name, children.start(f"vLLM ({own.name})", command, log, environment), own.port)


def _transfer(connector: str, role: str, lookup_port: int) -> str:
    if connector == "p2p":
        return p2p_config(role)
    if connector == "store":
        return transfer_config(lookup_port, role)
    return p2p_and_pool_config(role, lookup_port)


def _own_environment() -> dict[str, str]:
    # VLLM_CPU_KVCACHE_SPACE would win over the command line.
    return {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}


def _device_environment(start: _Start, gpus: list[str]) -> dict[str, str]:
    if gpus:
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "VLLM_HOST_IP": HOST}
    threads = max(1, len(os.sched_getaffinity(0)) // start.step.instances)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), **cpu_environment()}


def _url(instance: Instance) -> str:
    return f"http://{HOST}:{instance.port}"


def _all_ready(port: int, step: Step) -> bool:
    text = fetch(port, "/status")
    if text is None:
        return False
    status = json.loads(text)
    states = [one["state"] for one in (*status["prefill"], *status["decode"])]
    return states == ["ready"] * step.instances
