"""The registry that says who a prefill instance's workers are, over real HTTP."""

import asyncio
import time

import pytest

from mooncake.cli.loopback import free_ports
from mooncake.errors import ConfigError
from mooncake.vllm.push import registry
from mooncake.vllm.push.registry import Directory, Registration, Registry, UnknownEngineError, announce, serve


def worker(engine: str, tensor: int = 0, pipeline: int = 0, *, started: float = 1.0, size: int = 2) -> Registration:
    return Registration(engine, 0, tensor, pipeline, f"{engine}:{tensor}", size, 1, started)


def test_an_engine_is_shown_once_all_its_workers_are_known():
    known = Registry()
    assert known.register(worker("a")) == ""
    assert known.engines() == {}
    assert known.register(worker("a", 1)) == ""
    expected = {0: {"engine_id": "a", "worker_addr": {0: {0: "a:0"}, 1: {0: "a:1"}}}}
    assert known.engines() == expected
    known.register(worker("a", 1))  # again: nothing changes
    assert known.engines() == expected


def test_the_later_engine_replaces_the_former():
    known = Registry()
    for tensor in (0, 1):
        known.register(worker("a", tensor))
    assert known.register(worker("b", started=2.0)) == ""
    assert known.engines() == {}  # not the old one's workers beside the new one's
    assert "engine b, which started later" in known.register(worker("a", 1))
    known.register(worker("b", 1, started=2.0))
    assert known.engines()[0]["engine_id"] == "b"


def test_an_engine_that_says_nothing_is_forgotten(monkeypatch):
    known = Registry()
    known.register(worker("a", size=1))
    known.register(Registration("vLLM's", 1, 0, 0, "tcp://x:1"))  # vLLM's own workers say it once
    later = time.monotonic() + 31
    monkeypatch.setattr(registry.time, "monotonic", lambda: later)
    assert {each["engine_id"] for each in known.engines().values()} == {"vLLM's"}


@pytest.fixture
def port():
    return free_ports(1)[0]


def test_workers_make_themselves_known_again(port, monkeypatch):
    monkeypatch.setattr(registry, "_EVERY", 0.1)

    async def scenario() -> None:
        url = f"http://127.0.0.1:{port}"
        tasks = [asyncio.create_task(announce(url, worker("a", tensor))) for tensor in (0, 1)]  # before it is there
        for _ in range(2):  # and once it was restarted
            runner = await serve(Registry(), "127.0.0.1", port)
            found = await asyncio.wait_for(_until_known(url, "a"), 5)
            assert found.addresses == {(0, 0): "a:0", (1, 0): "a:1"}
            assert (found.tensor_size, found.pipeline_size) == (2, 1)
            await runner.cleanup()
        with pytest.raises(UnknownEngineError, match="cannot be asked"):
            await Directory().find(url, "a")
        for task in tasks:
            task.cancel()

    asyncio.run(scenario())


async def _until_known(url: str, engine: str):
    while True:
        try:
            return await Directory().find(url, engine)
        except UnknownEngineError:
            await asyncio.sleep(0.05)


def test_an_engine_that_is_not_there_any_more(port):
    async def scenario() -> None:
        known = Registry()
        known.register(worker("new", size=1))
        runner = await serve(known, "127.0.0.1", port)
        directory = Directory()
        with pytest.raises(UnknownEngineError, match=r"engine old is not at http://.* \(there is new\)"):
            await directory.find(f"http://127.0.0.1:{port}", "old")
        await directory.find(f"http://127.0.0.1:{port}", "new")
        await runner.cleanup()
        await directory.find(f"http://127.0.0.1:{port}", "new")  # is remembered
        directory.forget(f"http://127.0.0.1:{port}", "new")
        with pytest.raises(UnknownEngineError):
            await directory.find(f"http://127.0.0.1:{port}", "new")

    asyncio.run(scenario())


def test_a_port_that_is_taken(port):
    async def scenario() -> None:
        runner = await serve(Registry(), "127.0.0.1", port)
        with pytest.raises(ConfigError, match=f"cannot listen on port {port} .* VLLM_MOONCAKE_BOOTSTRAP_PORT"):
            await serve(Registry(), "127.0.0.1", port)
        await runner.cleanup()

    asyncio.run(scenario())
