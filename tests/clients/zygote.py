"""A client that is imported once and forked for every process of the tests: SGLang alone takes ten seconds.

    python -m tests.clients.zygote MODULE...      in the vLLM environment

Imports modules of this package, which import the client.  Reads one JSON line per process, {"module", "function",
"arguments", "environment", "log", "result"}, and answers with the pid of the fork; that one calls the function and
writes what it returns as JSON into the file "result".  Ends, with all its forks, when its input closes or its parent
dies.  Never imports `mooncake`: every fork does that by itself, as a process that was started normally.
"""

import importlib
import json
import sys
from pathlib import Path

from tests.e2e.zygote import serve_forks, take_place_of_parent


def become_process(request: dict) -> None:
    take_place_of_parent(request)
    module = sys.modules[f"tests.clients.{request['module']}"]
    result = getattr(module, request["function"])(**request["arguments"])
    Path(request["result"]).write_text(json.dumps(result))


def import_clients() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(f"tests.clients.{module}")
    assert "mooncake" not in sys.modules, "a client has imported mooncake before it was forked"


if __name__ == "__main__":
    serve_forks(import_clients, become_process)
