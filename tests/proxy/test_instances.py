"""Instances that come, go, fall ill and get well, and which of them gets a request."""

import asyncio
import itertools
import signal
import socket
import subprocess
import threading
import time

from tests.processes import BIN, wait_until
from tests.proxy.processes import ADMIN_KEY, assert_whole, expected, greedy, http, stream, streamed


def test_add_and_remove_under_load(make_engine, make_proxy):
    old, new = make_engine(gap_ms=5), make_engine(gap_ms=5)
    proxy = make_proxy(decode=[old])
    body = greedy(20)

    async def run():
        stop = asyncio.Event()

        async def load():
            answers = []
            while not stop.is_set():
                answers.append(await stream(proxy.url, body))
            return answers

        clients = [asyncio.create_task(load()) for _ in range(6)]
        await asyncio.sleep(0.3)
        began = time.monotonic()
        status, _, answer = await asyncio.to_thread(proxy.change, "add", "decode", new)
        assert (status, answer["status"]) == (200, "added")
        await asyncio.to_thread(wait_until, lambda: len(new.bodies()) >= 3, 5, "load on the new instance")
        assert time.monotonic() - began < 5
        status, _, answer = await asyncio.to_thread(proxy.change, "remove", "decode", old)
        assert (status, answer["status"]) == (200, "draining")
        await asyncio.to_thread(wait_until, lambda: len(proxy.instances()) == 1, 5, "the removal")
        handled = len(old.bodies())
        await asyncio.sleep(0.3)
        stop.set()
        answers = list(itertools.chain(*await asyncio.gather(*clients)))
        assert len(old.bodies()) == handled
        assert old.seen()["cancelled"] == 0
        return answers

    for answer in asyncio.run(run()):
        assert_whole(answer, body)


def test_drain_limit_moves_what_is_left(make_engine, make_proxy):
    old, new = make_engine(gap_ms=100), make_engine()
    proxy = make_proxy("--drain-timeout=0.4", decode=[old])
    body = greedy(60)

    async def run():
        task = asyncio.create_task(stream(proxy.url, body))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(proxy.change, "add", "decode", new)
        await asyncio.to_thread(proxy.change, "remove", "decode", old)
        return await task

    assert_whole(asyncio.run(run()), body)
    wait_until(lambda: [one["url"] for one in proxy.instances()] == [new.url])


def test_added_again_while_it_drains(make_engine, make_proxy):
    engine = make_engine(gap_ms=30)
    proxy = make_proxy(decode=[engine])
    body = greedy(30)

    async def run():
        task = asyncio.create_task(stream(proxy.url, body))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(proxy.change, "remove", "decode", engine)
        assert (await asyncio.to_thread(proxy.instance, engine))["state"] == "draining"
        assert (await asyncio.to_thread(proxy.change, "add", "decode", engine))[0] == 200
        return await task

    assert_whole(asyncio.run(run()), body)
    wait_until(lambda: proxy.instance(engine)["state"] == "ready")
    assert_whole(streamed(proxy.url, body), body)


def test_adding_prefill_with_a_bootstrap_port(make_engine, make_proxy):
    prefill, decode = make_engine(), make_engine()
    proxy = make_proxy(decode=[decode])
    assert proxy.change("add", "prefill", prefill, bootstrap_port=prefill.port)[0] == 200
    wait_until(lambda: proxy.instance(prefill)["state"] == "ready")
    body = greedy(5)
    assert_whole(streamed(proxy.url, body), body)
    assert decode.bodies()[0]["kv_transfer_params"]["remote_bootstrap_addr"] == prefill.url


def test_who_may_change_instances(make_engine, make_proxy):
    engine = make_engine()
    proxy = make_proxy(decode=[engine])
    for key in ("", "wrong", ADMIN_KEY + "x"):
        assert proxy.change("add", "decode", engine, key=key)[0] == 401
        assert proxy.change("remove", "decode", engine, key=key)[0] == 401
    closed = make_proxy(decode=[engine], key=None)
    for key in ("", ADMIN_KEY):
        status, _, answer = closed.change("add", "decode", engine, key=key)
        assert status == 403
        assert "ADMIN_API_KEY" in answer["error"]["message"]
    assert len(proxy.instances()) == len(closed.instances()) == 1


def test_bad_changes(make_engine, make_proxy):
    engine = make_engine()
    proxy = make_proxy(decode=[engine])
    for what in ("add", "remove"):
        url = f"{proxy.url}/instances/{what}"
        for raw in (b"", b"{", b"[]", b"{}", b'{"role": "cook", "url": "http://x"}', b'{"role": "decode"}',
                    b'{"role": "decode", "url": 3}', b'{"role": "decode", "url": "http://x", "more": 1}'):  # fmt: skip
            status, _, answer = http(url, raw=raw, headers={"X-API-Key": ADMIN_KEY})
            assert status == 400, raw
            assert answer["error"]["message"].count("\n") == 0
    for body in (
        {"role": "decode", "url": "nonsense"},
        {"role": "decode", "url": "ftp://host"},
        {"role": "decode", "url": "http://x", "bootstrap_port": 1},
        {"role": "prefill", "url": "http://x", "bootstrap_port": 70000},
        {"role": "decode", "url": engine.url + "/"},
    ):
        assert http(f"{proxy.url}/instances/add", body, {"X-API-Key": ADMIN_KEY})[0] == 400, body
    nobody = {"role": "decode", "url": "http://127.0.0.1:1"}
    assert http(f"{proxy.url}/instances/remove", nobody, {"X-API-Key": ADMIN_KEY})[0] == 404


def test_ejected_at_once_and_back_at_once(make_engine, make_proxy):
    first, second = make_engine(), make_engine()
    proxy = make_proxy("--health-interval=30", decode=[first, second])
    body = greedy(5)
    first.kill()
    for _ in range(4):
        assert_whole(streamed(proxy.url, body), body)
    assert proxy.instance(first)["state"] == "ejected"
    assert proxy.metric("mooncake_proxy_ejections_total", role="decode") == 1
    first.start()
    wait_until(lambda: proxy.instance(first)["state"] == "ready", 1, "the return")


def test_an_engine_that_says_it_is_unwell(make_engine, make_proxy):
    engine = make_engine()
    proxy = make_proxy("--health-interval=0.1", decode=[engine, make_engine()])
    engine.control(health=503)
    wait_until(lambda: proxy.instance(engine)["state"] == "ejected", 2)
    engine.control(health=200)
    wait_until(lambda: proxy.instance(engine)["state"] == "ready", 2)


def test_not_moved_from_a_silent_instance_when_it_is_the_only_one(make_engine, make_proxy):
    """A busy engine may be slow to answer health checks: what it has begun it may finish."""
    engine = make_engine(gap_ms=20)
    flags = ("--health-interval=0.1", "--health-timeout=0.2", "--health-failures=2")
    proxy = make_proxy(*flags, decode=[engine])
    body = greedy(30)

    async def run():
        task = asyncio.create_task(stream(proxy.url, body))
        await asyncio.sleep(0.3)
        engine.signal(signal.SIGSTOP)
        await asyncio.to_thread(wait_until, lambda: proxy.instance(engine)["state"] == "ejected")
        engine.signal(signal.SIGCONT)
        return await task

    assert_whole(asyncio.run(run()), body)
    assert len(engine.bodies()) == 1


def _ask_many(proxy, bodies):
    async def run():
        return await asyncio.gather(*(stream(proxy.url, body) for body in bodies))

    for answer, body in zip(asyncio.run(run()), bodies, strict=True):
        assert answer.text == expected(body)


def test_round_robin(make_engine, make_proxy):
    engines = [make_engine() for _ in range(3)]
    _ask_many(make_proxy(decode=engines), [greedy(3)] * 12)
    assert [len(engine.bodies()) for engine in engines] == [4, 4, 4]


def test_least_loaded(make_engine, make_proxy):
    slow, quick = make_engine(first_ms=3000), make_engine()
    proxy = make_proxy("--policy=least_loaded", decode=[slow, quick])

    async def run():
        waiting = [asyncio.create_task(stream(proxy.url, greedy(3))) for _ in range(2)]
        await asyncio.sleep(0.3)
        for _ in range(6):
            await stream(proxy.url, greedy(3))
        for task in waiting:
            task.cancel()

    asyncio.run(run())
    assert len(slow.bodies()) == 1
    assert len(quick.bodies()) == 7


def test_prefix_affinity(make_engine, make_proxy):
    engines = [make_engine() for _ in range(3)]
    proxy = make_proxy("--policy=prefix_affinity", "--prefix-length=8", decode=engines)
    where: dict[str, set[int]] = {}
    for number in range(8):
        for end in ("one", "two", "three"):
            prompt = f"prefix {number} {end}"
            before = [len(engine.bodies()) for engine in engines]
            assert streamed(proxy.url, greedy(1, prompt)).done
            after = [len(engine.bodies()) for engine in engines]
            where.setdefault(prompt[:8], set()).add(
                next(e.url for e, b, a in zip(engines, before, after, strict=True) if a > b)
            )
    assert all(len(places) == 1 for places in where.values()), "prompts that begin alike go to one instance"
    assert len(set.union(*where.values())) >= 2, "different ones do not"


def test_prefix_affinity_spreads_a_crowd(make_engine, make_proxy):
    engines = [make_engine(gap_ms=20) for _ in range(3)]
    proxy = make_proxy("--policy=prefix_affinity", decode=engines)
    _ask_many(proxy, [greedy(20)] * 30)
    counts = sorted(len(engine.bodies()) for engine in engines)
    assert counts[0] >= 6
    assert counts[-1] <= 14


def test_bad_arguments():
    """One sentence each."""
    wrong = (
        ["--decode", "nonsense"],
        ["--prefill", "http://x", "many"],
        ["--prefill", "http://x", "1", "2"],
        ["--decode", "http://x", "--decode", "http://x/"],
        ["--prefill", "http://x", "0"],
    )
    runs = [subprocess.Popen([BIN / "mooncake_proxy", *one], stderr=subprocess.PIPE, text=True) for one in wrong]
    for run in runs:
        _, text = run.communicate(timeout=20)
        assert run.returncode == 1
        assert text.startswith("mooncake_proxy: ")
        assert text.count("\n") == 1


class _Deaf:
    """Answers health checks until it is told to take no connection any more: its queue fills, and nobody is refused."""

    def __init__(self, cleanup) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._cleanup = cleanup
        cleanup.callback(self._listening.close)
        self._deaf = False
        thread = threading.Thread(target=self._answer)
        thread.start()
        cleanup.callback(thread.join)
        cleanup.callback(setattr, self, "_deaf", True)

    def _answer(self) -> None:
        self._listening.settimeout(0.05)
        while not self._deaf:
            try:
                connection = self._listening.accept()[0]
            except TimeoutError:
                continue
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def go_deaf(self) -> None:
        self._deaf = True
        time.sleep(0.1)
        for _ in range(8):
            waiting = self._cleanup.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(self._listening.getsockname())


def test_a_connection_that_is_not_made_in_time_ejects_nobody_at_once(make_engine, make_proxy, cleanup):
    """It may only be busy, as the proxy itself may be: that is for the health checks to say."""
    deaf, other = _Deaf(cleanup), make_engine()
    flags = ("--connect-timeout=0.3", "--health-timeout=0.3", "--health-failures=1000", "--health-interval=0.05")
    proxy = make_proxy(*flags, decode=[deaf, other])
    deaf.go_deaf()
    for _ in range(4):
        assert_whole(streamed(proxy.url, greedy()), greedy())
    assert proxy.metric("mooncake_proxy_retries_total", why="unreached") > 0
    assert proxy.instance(deaf)["state"] == "ready"
