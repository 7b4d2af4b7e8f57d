"""`mooncake bench xpyd`: how x prefill and y decode instances answer an open-loop load, step after step.

Each step starts a pool, its instances and a proxy, warms them up, measures, and stops them.  A step that the machine is
too small for is skipped, one that fails is reported; the next one is run in any case.
"""

import argparse
import importlib.util
import json
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

from mooncake.bench.deployment import EngineSettings, Ports, deployed
from mooncake.bench.figures import StepFigures
from mooncake.bench.load import Target
from mooncake.bench.machine import RUNTIME_SIZE, Machine, Need, this_machine, visible_gpus, weights_size
from mooncake.bench.report import check_libraries, write_report
from mooncake.bench.serve_load import LoadFailed, run_load, settings_of, workload_of
from mooncake.bench.steps import Step
from mooncake.bench.workload import DEFAULT_VOCABULARY, Workload
from mooncake.cli.children import ChildFailed, Children, Interrupted, module_command
from mooncake.cli.engine_settings import API_SERVER
from mooncake.cli.loopback import HOST, is_free
from mooncake.errors import ConfigError

_GPU_MEMORY = 4 << 30  # bytes of the host that an instance on GPUs takes beside its pool segment


def run(options: argparse.Namespace) -> int:
    """Returns 1 if a step failed or a request did, 128 + n after signal n; skipped steps are no failure."""
    if not options.no_report:
        check_libraries()
    settings, need = _engines(options)
    if options.vocabulary is None:
        options.vocabulary = _vocabulary(options.model)
    work = workload_of(options)
    ports = _ports(options)
    output = options.output or Path(f"xpyd-{time.strftime('%Y%m%d-%H%M%S')}")
    logs = output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    print(f"{', '.join(map(str, options.steps))} with {settings.model}; logs in {logs}", flush=True)
    figures: list[StepFigures] = []
    code = 0
    try:
        with tempfile.TemporaryDirectory(prefix="mooncake-xpyd-") as name, Children(Path(name)) as children:
            for step in options.steps:
                run_of_step = _Run(children, settings, need, work, ports, logs / str(step), Path(name) / str(step))
                figures.append(run_of_step.measure(step, options))
                print(figures[-1].text(), flush=True)
    except Interrupted as signal:
        print("Interrupted; everything that was started has been stopped.", flush=True)
        code = signal.exit_code
    if figures and not options.no_report:
        told = {"model": settings.model, "connector": settings.connector, **settings_of(work)}
        for file in write_report(output, told, figures):
            print(f"wrote {file}", flush=True)
    return code or int(not all(step.passed for step in figures))


class _Run:
    """One step's."""

    def __init__(
        self,
        children: Children,
        settings: EngineSettings,
        need: Need,
        work: Workload,
        ports: Ports,
        logs: Path,
        room: Path,
    ) -> None:
        self._children, self._settings, self._need = children, settings, need
        self._work, self._ports, self._logs, self._room = work, ports, logs, room

    def measure(self, step: Step, options: argparse.Namespace) -> StepFigures:
        """The step's figures; or why there are none, in their `failure`."""
        machine = this_machine()
        if reason := machine.lacks(step, self._need):
            return StepFigures(str(step), failure=reason, skipped=True)
        if reason := _taken(step, self._ports):
            return StepFigures(str(step), failure=reason)
        shutil.rmtree(self._logs, ignore_errors=True)
        self._logs.mkdir(parents=True)
        self._room.mkdir()
        try:
            return self._deploy_and_measure(step, machine, options)
        except (ChildFailed, LoadFailed) as error:
            return StepFigures(str(step), failure=f"{error}\nThe logs are in {self._logs}.")
        finally:
            shutil.rmtree(self._room, ignore_errors=True)

    def _deploy_and_measure(self, step: Step, machine: Machine, options: argparse.Namespace) -> StepFigures:
        print(f"{step}: starting {step.instances} instances ...", flush=True)
        start = time.monotonic()
        with deployed(
            self._children, step, self._settings, self._ports, machine.gpus, self._logs, self._room
        ) as running:
            print(f"{step}: ready after {time.monotonic() - start:.0f} s, at {running.url}", flush=True)
            target = Target(running.url, self._settings.served_name, options.request_timeout)
            warm_up = 2 * max(step.prefill, step.decode) if options.warmup is None else options.warmup
            before: dict[str, float] = {}
            figures = run_load(
                str(step), target, self._work, warm_up, self._children.check, lambda: before.update(running.sources())
            )
            after = running.sources()
        figures.sources = {source: count - before.get(source, 0.0) for source, count in after.items()}
        return figures


def _engines(options: argparse.Namespace) -> tuple[EngineSettings, Need]:
    """What the instances are, and what one takes.  Raises ConfigError."""
    if not options.model:
        raise ConfigError("--model, or the variable MODEL, must name the model: a folder, or what vLLM can find.")
    gpus = _gpus(options)
    size = weights_size(options.model)
    if options.instance_memory:
        memory = options.instance_memory
    elif gpus:
        memory = _GPU_MEMORY + options.segment_size * gpus
    else:
        memory = RUNTIME_SIZE + size + options.kv_cache_size + options.segment_size
    settings = EngineSettings(
        command=_command(options.engine),
        model=options.model,
        served_name=Path(options.model).name,
        connector=options.connector,
        gpus=gpus,
        max_model_len=options.max_model_len or options.input_len.high + options.output_len.high + 1,
        kv_cache_size=options.kv_cache_size,
        segment_size=options.segment_size,
        arguments=tuple(shlex.split(options.engine_args)),
        prefill_arguments=tuple(shlex.split(options.prefill_args)),
        decode_arguments=tuple(shlex.split(options.decode_args)),
        ready_limit=options.ready_timeout,
    )
    return settings, Need(gpus, memory)


def _gpus(options: argparse.Namespace) -> int:
    """GPUs an instance; 0 for CPUs."""
    if options.device == "cpu" or (options.device == "auto" and not visible_gpus()):
        if options.tensor_parallel_size != 1:
            raise ConfigError("--tensor-parallel-size is for GPUs; on CPUs an instance is one process.")
        return 0
    return int(options.tensor_parallel_size)


def _command(engine: str) -> tuple[str, ...]:
    if engine:
        words = tuple(shlex.split(engine))
        if not words or not shutil.which(words[0]):
            raise ConfigError(f'--engine: there is no program "{words[0] if words else ""}" to run.')
        return words
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed for {sys.executable}: run this command where it is, or give the command that "
            f'starts it, such as --engine "/path/to/python -m {API_SERVER}".'
        )
    return tuple(module_command(API_SERVER))


def _vocabulary(model: str) -> int:
    """Of a model that is a folder here; else what nearly every model has."""
    try:
        found = json.loads((Path(model) / "config.json").read_text())
        return int(found.get("vocab_size") or found["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return DEFAULT_VOCABULARY


def _ports(options: argparse.Namespace) -> Ports:
    return Ports(options.prefill_port_base, options.decode_port_base, options.master_port, options.proxy_port)


def _taken(step: Step, ports: Ports) -> str:
    """Which of the given ports is not free."""
    wanted = [(ports.master, "--master-port"), (ports.proxy, "--proxy-port")]
    wanted += [(ports.prefill + number, "--prefill-port-base") for number in range(step.prefill) if ports.prefill]
    wanted += [(ports.decode + number, "--decode-port-base") for number in range(step.decode) if ports.decode]
    for port, flag in wanted:
        if port and not is_free(port):
            return f"Another program listens on port {port} of {HOST}; choose another {flag}."
    return ""
