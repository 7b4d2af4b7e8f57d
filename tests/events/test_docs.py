"""The commands and examples of docs/kv_events.md work when they are pasted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.events.publisher import Publisher
from tests.processes import BIN, Master, free_port, wait_until
from tests.proxy.conftest import idle_engines, make_engine  # noqa: F401 -- fixtures
from tests.proxy.processes import http

PAGE = (Path(__file__).parents[2] / "docs" / "kv_events.md").read_text()
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}


def _commands(name: str) -> list[str]:
    """Indented commands, with their further lines."""
    text = re.sub(r"(?<=[\\,])\n\s{8,}", " ", PAGE).replace("\\ ", "")
    return [line.strip() for line in text.splitlines() if line.startswith(f"    {name} ")]


def _start(cleanup, command: str, **options) -> subprocess.Popen:
    process = subprocess.Popen(["sh", "-c", f"exec {command}"], env=ENVIRONMENT, **options)
    cleanup.callback(process.wait, 10)
    cleanup.callback(process.terminate)
    return process


def test_the_master_and_the_subscriber(cleanup, make_store):
    (command,) = _commands("mooncake_master")
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    port = str(free_port())
    master = Master(*command.replace("5557", port).split()[1:])
    cleanup.callback(master.stop)
    reader = subprocess.Popen(
        [sys.executable, "-c", example.replace("5557", port)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    cleanup.callback(reader.wait, 10)
    cleanup.callback(reader.kill)
    store = make_store(at=master)
    for i in range(20):  # until it has subscribed
        assert store.put(f"k{i}", b"x") == 0
        wait_until(lambda i=i: json.loads(master.get("/kv_events/status"))["published_events"] > i)
    assert re.fullmatch(r"\d+ stored k\d+ cpu\n", reader.stdout.readline())


@pytest.mark.slow
def test_the_indexer_and_the_proxy(cleanup, make_engine):  # noqa: F811
    publisher = Publisher()
    cleanup.callback(publisher.stop)
    ports = {"5560": str(publisher.port), "5561": str(publisher.replay_port), "13333": str(free_port())}
    ports |= {name: str(make_engine().port) for name in ("8100", "8101", "8200")}

    def real(command: str) -> str:
        return re.sub(r"\b(13333|55\d\d|8\d{3})\b", lambda found: ports[found.group()], command)

    (command,) = _commands("mooncake_conductor")
    _start(cleanup, real(command))
    url = f"http://127.0.0.1:{ports['13333']}"
    wait_until(lambda: _is_up(url), what="the indexer")
    register, query, unregister = map(real, _commands("curl"))
    assert _ask(register)["status"] == "registered successfully"
    name = f"127.0.0.1:{ports['8100']}"
    assert _ask(query) == {"default": {name: {"longest_matched": 0, "GPU": 0, "DP": {"0": 0}, "CPU": 0, "DISK": 0}}}
    (command,) = _commands("mooncake_proxy")
    port = free_port()
    _start(cleanup, f"{real(command)} --port {port}", stderr=subprocess.DEVNULL)
    proxy = f"http://127.0.0.1:{port}"
    wait_until(lambda: _is_up(proxy), what="the proxy")
    assert http(f"{proxy}/v1/completions", {"model": "MODEL", "prompt": "Hello", "max_tokens": 2})[0] == 200
    assert _ask(unregister)["removed_instances"] == [f"{name}|default|0"]


def test_the_file(tmp_path):
    from mooncake.indexer.config import read_config

    (text,) = re.findall(r"^    (\{\"http_server_port.*?\}\}\})$", PAGE, re.DOTALL | re.MULTILINE)
    path = tmp_path / "conductor.json"
    path.write_text(text)
    config = read_config(str(path))
    assert [one.instance_id for one in config.registrations] == ["127.0.0.1:8100"]
    assert config.port == 13333


def _ask(command: str) -> dict:
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=20, check=True)
    return json.loads(run.stdout)


def _is_up(url: str) -> bool:
    try:
        return http(url + "/health")[0] == 200
    except OSError:
        return False
