"""A client that is imported once and forked for every process of the tests: SGLang alone takes ten seconds.

    python -m tests.clients.zygote MODULE...      in the vLLM environment

Imports modules of this package, which import the client.  Reads one JSON line per process, {"module", "function",
"arguments", "environment", "log", "result"}, and answers with the pid of the fork; that one calls the function and
writes what it returns as JSON into the file "result".  Ends, with all its forks, when its input closes or its parent
dies.  Never imports `mooncake`: every fork does that by itself, as a process that was started normally.
"""

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from tests.e2e.zygote import die_with_parent


def become_process(request: dict) -> None:
    die_with_parent()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(request["environment"])
    module = sys.modules[f"tests.clients.{request['module']}"]
    result = getattr(module, request["function"])(**request["arguments"])
    Path(request["result"]).write_text(json.dumps(result))


def main() -> None:
    die_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    for module in sys.argv[1:]:
        importlib.import_module(f"tests.clients.{module}")
    assert "mooncake" not in sys.modules, "a client has imported mooncake before it was forked"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    print("ready", file=replies, flush=True)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                become_process(json.loads(line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(pid, file=replies, flush=True)


if __name__ == "__main__":
    main()
