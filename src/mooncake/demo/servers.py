"""The servers of the demo: the pool's master and vLLM instances, on loopback ports that are free."""

import os
import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mooncake.cli.children import Child, ChildFailed, Children, module_command, own_command
from mooncake.cli.engine_settings import API_SERVER, cpu_engine_arguments, cpu_environment
from mooncake.cli.loopback import HOST, accepts, fetch, free_ports

BLOCK_SIZE = 32  # tokens; the smallest that vLLM's CPU attention takes
MODEL_ALIAS = "smollm2"
MAX_MODEL_LEN = 4096
KV_CACHE_SIZE = 512 << 20  # bytes; over 11,000 tokens

MASTER_LIMIT = 20.0  # seconds until it answers
INSTANCE_LIMIT = 300.0

_UNIX_PATH_MAX = 107  # characters of a unix socket's path

_MEMORY = re.compile(r"Available memory on node \d+ \(([\d.]+)/[\d.]+ GiB\)")
_FIRST_ERROR = re.compile(r"^.*?\b(\w+Error: .+)$", re.MULTILINE)
_PORT_TAKEN = re.compile(r"address already in use", re.IGNORECASE)


@dataclass(frozen=True)
class Master:
    child: Child
    port: int
    metrics_port: int


@dataclass(frozen=True)
class Instance:
    name: str
    child: Child
    port: int

    def is_healthy(self) -> bool:
        return fetch(self.port, "/health") is not None


def start_master(children: Children, folder: Path, port: int = 0) -> Master:
    """Start the master, at a free port unless one is given, and wait until it answers."""
    free, metrics_port = free_ports(2)
    port = port or free
    command = own_command(
        "mooncake.cli.master",
        f"--rpc_address={HOST}",
        f"--rpc_port={port}",
        f"--metrics_host={HOST}",
        f"--metrics_port={metrics_port}",
        "--logtostderr",
    )
    child = children.start("the master", command, folder / "master.log")
    children.wait_ready(child, lambda: accepts(port) and fetch(metrics_port, "/health") is not None, MASTER_LIMIT)
    return Master(child, port, metrics_port)


def start_instance(
    children: Children, name: str, model: Path, folder: Path, transfer: str, environment: Mapping[str, str]
) -> Instance:
    """Start a vLLM instance.  `transfer`: the text for --kv-transfer-config, empty for an instance by itself."""
    (port,) = free_ports(1)
    command = module_command(
        API_SERVER,
        *cpu_engine_arguments(
            model,
            MODEL_ALIAS,
            port,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            kv_cache_size=KV_CACHE_SIZE,
            transfer=transfer,
        ),
    )
    whole_environment = {
        # VLLM_CPU_KVCACHE_SPACE would win over the command line.
        **{name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"},
        **cpu_environment(),
        **temporary_files(folder),
        **environment,
    }
    log = folder / f"{name.replace(' ', '-').lower()}.log"
    return Instance(name, children.start(f"vLLM ({name})", command, log, whole_environment), port)


def temporary_files(folder: Path) -> dict[str, str]:
    """Puts what vLLM leaves behind into `folder`; its sockets only if their names do not get too long there."""
    longest = f"{folder}/lookup_rpc_port_65535_host_{socket.gethostname()}_dp_rank0"
    sockets = str(folder) if len(longest) <= _UNIX_PATH_MAX else tempfile.gettempdir()
    return {"TMPDIR": str(folder), "VLLM_RPC_BASE_PATH": sockets}


def wait_ready(children: Children, *instances: Instance, limit: float = INSTANCE_LIMIT) -> None:
    """Until all of them answer.  Raises ChildFailed with the reason if one does not start."""
    try:
        for instance in instances:
            children.wait_ready(instance.child, instance.is_healthy, limit, poll=0.25)
    except ChildFailed as error:
        raise ChildFailed(_explain(instances) + str(error)) from None


def _explain(instances: tuple[Instance, ...]) -> str:
    """The reason in a sentence, to go ahead of the log's end, which seldom holds it."""
    for instance in instances:
        text = instance.child.log.read_text(errors="replace")
        if memory := _MEMORY.search(text):
            return (
                f"vLLM's KV cache does not fit into NUMA node 0, which has {memory[1]} GiB left: end other programs "
                f"or use a machine with more memory.\n"
            )
        if _PORT_TAKEN.search(text):
            return "A port was taken by another program in the moment between choosing and using it: start again.\n"
        if error := _FIRST_ERROR.search(text):
            return f"{instance.child.name} says: {error[1]}\n"
    return ""
