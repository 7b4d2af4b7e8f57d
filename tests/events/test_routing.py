"""The proxy routes by what the indexer knows, and without it when that is late, wrong or gone."""

import signal
import threading
import time

import pytest

from mooncake.cli.proxy import main
from tests.events.indexer import Conductor
from tests.events.publisher import Publisher, stored
from tests.processes import stop, wait_until
from tests.proxy.conftest import idle_engines, make_engine  # noqa: F401 -- fixtures
from tests.proxy.processes import Proxy, greedy, greedy_chat
from tests.proxy.stub_engine import chat_text, ids_of

SIZE = 8
TEXT = "The quick brown fox jumps over the lazy dog, and then it does so once more for good measure. "


@pytest.fixture(scope="module")
def conductor():
    made = Conductor()
    yield made
    made.stop()


@pytest.fixture
def fleet(conductor, make_engine, cleanup):  # noqa: F811
    """(proxy, engines, publishers): three decode instances that publish."""

    def make(*flags: str, prefill: int = 0, decode: int = 3):
        engines = [make_engine() for _ in range(prefill + decode)]
        publishers = []
        for engine in engines:
            publisher = Publisher()
            cleanup.callback(publisher.stop)
            name = f"127.0.0.1:{engine.port}"
            conductor.register(name, publisher, SIZE)
            cleanup.callback(conductor.post, "/unregister", instance_id=name)
            publishers.append(publisher)
        proxy = Proxy(
            "--policy=prefix_affinity", f"--indexer={conductor.url}", *flags,
            prefill=engines[:prefill], decode=engines[prefill:],
        )  # fmt: skip
        cleanup.callback(proxy.stop)
        return proxy, engines, publishers

    return make


def held_by(conductor, engine, publisher, tokens: list[int], count: int | None = None) -> None:
    """That engine has so many blocks of the prompt."""
    publisher.publish(stored(tokens, SIZE, 0, count))
    blocks = len(tokens) // SIZE if count is None else count
    name = f"127.0.0.1:{engine.port}"
    wait_until(lambda: conductor.longest(tokens, model="").get(name) == blocks * SIZE, what="the blocks")


def ask(proxy, body: dict) -> None:
    status, _, answer = proxy.ask({**body, "model": "m"})
    assert status == 200, answer


def test_the_longest_prefix_wins(conductor, fleet):
    proxy, engines, publishers = fleet("--indexer-timeout=5")
    for i, (engine, publisher) in enumerate(zip(engines, publishers, strict=True)):
        chat = greedy_chat(2, TEXT)
        held_by(conductor, engine, publisher, ids_of(TEXT), 4 + i)
        held_by(conductor, engine, publisher, ids_of(chat_text(chat)), 4 + i)
        for asked in (greedy(2, TEXT), greedy(2, ids_of(TEXT)), chat):
            before = len(engine.bodies())
            path = "/v1/chat/completions" if asked is chat else "/v1/completions"
            status, _, answer = proxy.ask({**asked, "model": "m"}, path)
            assert status == 200, answer
            assert len(engine.bodies()) == before + 1
    assert proxy.metric("mooncake_proxy_indexer_queries_total", result="matched") == 9
    assert sum(engine.seen()["tokenized"] for engine in engines) == 6  # tokens go as they are


def test_prefill_is_chosen_by_it(conductor, fleet):
    proxy, engines, publishers = fleet("--connector=store", "--indexer-timeout=5", prefill=2, decode=1)
    for i in (0, 1):
        held_by(conductor, engines[i], publishers[i], ids_of(TEXT * (i + 1)))
    for _ in range(3):
        ask(proxy, greedy(2, TEXT * 2))
    assert [len(engine.bodies()) for engine in engines] == [0, 3, 3]


def test_one_that_is_busy_is_spared(conductor, fleet):
    proxy, engines, publishers = fleet("--indexer-timeout=5")
    held_by(conductor, engines[0], publishers[0], ids_of(TEXT))
    held_by(conductor, engines[1], publishers[1], ids_of(TEXT), 2)
    engines[0].control(first_ms=4000)
    waiting = [threading.Thread(target=ask, args=(proxy, greedy(2, TEXT))) for _ in range(2)]
    for i, thread in enumerate(waiting, 1):
        thread.start()
        wait_until(lambda i=i: proxy.instance(engines[0])["in_flight"] == i, what="a busy instance")
    ask(proxy, greedy(2, TEXT))
    assert [len(engine.bodies()) for engine in engines] == [2, 1, 0]
    for thread in waiting:
        thread.join()


def test_a_prompt_that_nobody_has_goes_to_one_instance(conductor, fleet):
    proxy, engines, _ = fleet("--indexer-timeout=5")
    for _ in range(4):
        ask(proxy, greedy(2, TEXT))
    assert sorted(len(engine.bodies()) for engine in engines) == [0, 0, 4]
    assert proxy.metric("mooncake_proxy_indexer_queries_total", result="unmatched") == 4


@pytest.mark.slow
@pytest.mark.parametrize("who", ["indexer", "tokenizer"])
def test_late(cleanup, make_engine, who):  # noqa: F811
    """A request waits no longer than the limit, and then nobody is asked for a while."""
    conductor = Conductor()
    cleanup.callback(conductor.stop)
    engines = [make_engine() for _ in range(2)]
    flags = ["--policy=prefix_affinity", f"--indexer={conductor.url}", "--indexer-timeout=0.3"]
    proxy = Proxy(*flags, decode=engines)
    cleanup.callback(proxy.stop)
    if who == "indexer":
        stop(conductor.process.pid)
    else:
        for engine in engines:
            engine.control(tokenize_ms=20_000)
    ask_time = []
    for _ in range(4):
        began = time.monotonic()
        ask(proxy, greedy(2, TEXT))
        ask_time.append(time.monotonic() - began)
    assert 0.3 <= ask_time[0] < 2
    assert proxy.metric("mooncake_proxy_indexer_queries_total", result="late") < 4
    assert proxy.metric("mooncake_proxy_indexer_queries_total") == 4
    assert sorted(len(engine.bodies()) for engine in engines) == [0, 4]
    conductor.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_events_that_end_are_told_and_requests_go_on(cleanup, make_engine, capfd):  # noqa: F811
    """(Fault U157.)  The indexer says that it hears nothing any more; the proxy counts that nobody is known to have
    anything, and keeps a prompt where it was."""
    conductor = Conductor()
    cleanup.callback(conductor.stop)
    engines = [make_engine() for _ in range(3)]
    publishers = []
    for engine in engines:
        publishers.append(Publisher(0))
        conductor.register(f"127.0.0.1:{engine.port}", publishers[-1], SIZE)
    proxy = Proxy("--policy=prefix_affinity", f"--indexer={conductor.url}", "--indexer-timeout=5", decode=engines)
    cleanup.callback(proxy.stop)
    held_by(conductor, engines[1], publishers[1], ids_of(TEXT))
    ask(proxy, greedy(2, TEXT))
    assert proxy.metric("mooncake_proxy_indexer_queries_total", result="matched") == 1
    for publisher in publishers:
        publisher.stop()
    wait_until(lambda: not any(one["blocks"] for one in conductor.instances()), 15, "the end of what was known")
    assert [one["connected"] for one in conductor.instances()] == [False] * 3
    assert capfd.readouterr().err.count("is not there any more") == 3
    for _ in range(3):
        ask(proxy, greedy(2, "Another text, " + TEXT))
    assert sorted(len(engine.bodies()) for engine in engines) in ([0, 1, 3], [0, 0, 4])
    assert proxy.metric("mooncake_proxy_indexer_queries_total", result="unmatched") == 3


def test_gone_and_back(cleanup, make_engine):  # noqa: F811
    conductor = Conductor()
    engines = [make_engine() for _ in range(2)]
    proxy = Proxy("--policy=prefix_affinity", f"--indexer={conductor.url}", "--indexer-timeout=5", decode=engines)
    cleanup.callback(proxy.stop)
    conductor.stop()
    for _ in range(3):
        ask(proxy, greedy(2, TEXT))
    assert sorted(len(engine.bodies()) for engine in engines) == [0, 3]
    assert proxy.metric("mooncake_proxy_indexer_queries_total", result="failed") >= 1
    back = Conductor(port=conductor.port)
    cleanup.callback(back.stop)

    wait_until(lambda: proxy.ask(greedy(2, TEXT))[0] == 200 and _answers(proxy), what="the indexer's return")


def test_with_a_secret(cleanup, make_engine, monkeypatch):  # noqa: F811
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", "0123456789abcdef")
    conductor = Conductor()
    cleanup.callback(conductor.stop)
    status, answer = conductor.post("/query", token_ids=[1])
    assert status == 401
    assert "MOONCAKE_AUTH_TOKEN" in answer["error_message"]
    proxy = Proxy(
        "--policy=prefix_affinity", f"--indexer={conductor.url}", "--indexer-timeout=5", decode=[make_engine()]
    )
    cleanup.callback(proxy.stop)
    ask(proxy, greedy(2, TEXT))
    assert _answers(proxy)


def _answers(proxy) -> bool:
    return any(proxy.metric("mooncake_proxy_indexer_queries_total", result=one) for one in ("unmatched", "matched"))


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--indexer=http://127.0.0.1:1"], "--policy prefix_affinity"),
        (["--indexer=127.0.0.1:1", "--policy=prefix_affinity"], "expected a URL"),
    ],
)
def test_mistakes(flags, part, capsys):
    assert main(flags) == 1
    assert part in capsys.readouterr().err
