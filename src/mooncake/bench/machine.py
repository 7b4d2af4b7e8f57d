"""What this machine has for engines, and whether that is enough for a step."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mooncake.bench.steps import Step
from mooncake.transfer.memory import available_memory

RUNTIME_SIZE = 1280 << 20  # bytes that a vLLM on CPUs takes beside weights, KV cache and pool segment
_ENGINES_PER_CORE = 2  # on CPUs; more would measure nothing but their waiting for each other
_GIB = 1 << 30
_WEIGHTS = (".safetensors", ".bin", ".gguf")
_DEVICE = re.compile(r"nvidia\d+")


@dataclass(frozen=True)
class Need:
    """Of one instance.  `gpus` is 0 on CPUs; `memory` is bytes of the host's."""

    gpus: int
    memory: int


@dataclass(frozen=True)
class Machine:
    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them
    cores: int
    memory: int  # bytes that are available now

    def lacks(self, step: Step, need: Need) -> str:
        """Why the machine is too small for a step, as a sentence; empty if it is not."""
        count = step.instances
        if need.gpus * count > len(self.gpus):
            return (
                f"{step} needs {need.gpus * count} GPUs, {need.gpus} an instance, but this machine has "
                f"{len(self.gpus)}."
            )
        if not need.gpus and count > _ENGINES_PER_CORE * self.cores:
            return (
                f"{step} has {count} instances on CPUs, but this machine has {self.cores} cores: at most "
                f"{_ENGINES_PER_CORE} instances a core are run."
            )
        if need.memory * count > self.memory:
            return (
                f"{step} needs {need.memory * count / _GIB:.1f} GiB of memory, about {need.memory / _GIB:.1f} an "
                f"instance, but this machine has {self.memory / _GIB:.1f} left."
            )
        return ""


def this_machine() -> Machine:
    """As it is now."""
    return Machine(visible_gpus(), _cores(), available_memory())


def visible_gpus() -> tuple[str, ...]:
    """The NVIDIA devices that a child of this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1")
    if command := shutil.which("nvidia-smi"):
        try:
            listed = subprocess.run(
                [command, "--query-gpu=index", "--format=csv,noheader"],
                capture_output=True, text=True, timeout=20, check=True,
            )  # fmt: skip
            return tuple(line.strip() for line in listed.stdout.splitlines() if line.strip().isdigit())
        except (OSError, subprocess.SubprocessError):
            return ()
    return tuple(str(number) for number in range(sum(bool(_DEVICE.fullmatch(name)) for name in os.listdir("/dev"))))


def weights_size(model: str) -> int:
    """Bytes of the weights of a model that is a folder here; 0 for the name of one that is somewhere else."""
    folder = Path(model)
    if not folder.is_dir():
        return 0
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix in _WEIGHTS)


def _cores() -> int:
    """That this process may run on, less what its cgroup does not grant."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores
