"""A vLLM that is imported once and forked for every server: a start takes seconds instead of half a minute.

Runs in the vLLM environment.  Reads one JSON line per server, {"argv", "environment", "log"}, and answers with the
pid of the fork, which leads a session of its own.  Ends, with all its forks, when its input closes or its parent dies.
Never imports `mooncake`: every fork does that by itself, as a server that was started normally.
"""

import ctypes
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def import_vllm() -> None:
    """All that a server loads before it knows its model."""
    import vllm.v1.engine.utils

    for module in (
        "transformers.models.llama",
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.entrypoints.openai.api_server",
        "vllm.model_executor.models.llama",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.gpu_model_runner",
    ):
        importlib.import_module(module)

    # The engine's process is a fork as well, not an interpreter that imports everything again.
    vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def take_place_of_parent(request: dict) -> None:
    """In a fork that was asked for: die with the parent, and write to the request's log."""
    die_with_parent()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(request["environment"])


def become_server(request: dict) -> None:
    os.setsid()
    take_place_of_parent(request)
    sys.argv = ["api_server", *request["argv"]]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def serve_forks(prepare: Callable[[], None], become: Callable[[dict], None]) -> None:
    """Prepare, then fork for each request, until the input closes."""
    die_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    print("ready", file=replies, flush=True)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                become(json.loads(line))
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(pid, file=replies, flush=True)


if __name__ == "__main__":
    serve_forks(import_vllm, become_server)
