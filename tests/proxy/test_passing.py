"""What goes through the proxy unchanged, and what it says when nothing can."""

import asyncio
import http.client
import json
import re
import time

import pytest

from tests.processes import wait_until
from tests.proxy.processes import Streamed, assert_whole, expected, greedy, greedy_chat, stream, streamed
from tests.proxy.processes import http as ask


@pytest.mark.parametrize("make_body", [greedy, greedy_chat])
@pytest.mark.parametrize("split", [1, 7, 50])
def test_events_and_characters_split_over_chunks(make_engine, make_proxy, make_body, split):
    proxy = make_proxy(decode=[make_engine(split=split, gap_ms=0)])
    body = make_body(40)
    for temperature in (0, 1):
        assert_whole(streamed(proxy.url, {**body, "temperature": temperature}), body)


def test_a_sampled_stream_is_passed_on_byte_for_byte(make_engine, make_proxy):
    engine = make_engine()
    proxy = make_proxy(decode=[engine])
    body = {**greedy(10), "temperature": 1, "stream": True}
    direct, through = streamed(engine.url, body), streamed(proxy.url, body)
    own = rb'"id": "[^"]*"|"created": \d+'  # of each request
    assert re.sub(own, b"", through.raw) == re.sub(own, b"", direct.raw)
    assert direct.text == through.text
    assert through.headers["Content-Type"] == direct.headers["Content-Type"]
    assert "return_token_ids" not in engine.bodies()[-1]


def test_tokens_are_passed_on_at_once(make_engine, make_proxy):
    proxy = make_proxy(decode=[make_engine(gap_ms=50)])

    async def run():
        import aiohttp

        times = []
        async with aiohttp.ClientSession() as session:
            body = {**greedy(12), "stream": True}
            async with session.post(proxy.url + "/v1/completions", json=body) as response:
                async for _ in response.content.iter_any():
                    times.append(time.monotonic())
        return times

    times = asyncio.run(run())
    assert len(times) >= 12
    assert times[-1] - times[0] > 0.4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_in_one_piece(make_engine, make_proxy, path):
    engine = make_engine()
    proxy = make_proxy(decode=[engine])
    body = greedy(10) if path == "/v1/completions" else greedy_chat(10)
    status, headers, answer = proxy.ask(body, path, **{"X-Request-Id": "mine-1", "Authorization": "Bearer k"})
    assert status == 200
    choice = answer["choices"][0]
    assert (choice.get("text") or choice["message"]["content"]) == expected(body)
    assert headers["X-Request-Id"] == "mine-1"
    seen = engine.seen()["requests"][0]
    assert seen["headers"]["x-request-id"] == "mine-1"
    assert seen["headers"]["authorization"] == "Bearer k"
    assert seen["body"] == body


@pytest.mark.parametrize("status", [400, 404, 429, 422])
def test_refusals_pass_with_status_and_body(make_engine, make_proxy, status):
    engine = make_engine(status=status)
    proxy = make_proxy(decode=[engine, make_engine(status=status)])
    for streaming in (True, False):
        got, headers, answer = proxy.ask({**greedy(5), "stream": streaming})
        assert got == status
        assert answer == {"error": {"message": "the stub says no", "type": "Stub", "code": status}}
        assert headers["X-Stub"] == "no"
        assert headers["X-Request-Id"]
    assert len(engine.bodies()) == 1, "not tried again"
    assert proxy.metric("mooncake_proxy_requests_total", status=str(status), route="/v1/completions") == 2


def test_errors_of_an_engine_are_tried_elsewhere(make_engine, make_proxy):
    bad, good = make_engine(status=503), make_engine()
    proxy = make_proxy(decode=[bad, good])
    body = greedy(10)
    for _ in range(4):
        assert_whole(streamed(proxy.url, body), body)
    assert len(good.bodies()) == 4
    good.control(status=500)
    tried = len(bad.bodies()) + len(good.bodies())
    status, headers, answer = proxy.ask(body)
    assert status in (500, 503)
    assert answer["error"]["message"] == "the stub says no"
    assert headers["X-Stub"] == "no"
    assert len(bad.bodies()) + len(good.bodies()) == tried + 2, "each of them once"


@pytest.mark.parametrize(
    ("flag", "fault"),
    [
        ("--first-byte-timeout=0.4", {"first_ms": 30_000}),
        ("--chunk-timeout=0.4", {"hang_after": 4}),
    ],
)
def test_limits_of_time(make_engine, make_proxy, flag, fault):
    """A silent engine costs its limit, then the request goes on elsewhere; a long stream is never cut."""
    slow, good = make_engine(**fault), make_engine(gap_ms=40)
    proxy = make_proxy(flag, "--response-timeout=0.5", "--retries=1", decode=[slow, good])
    body = greedy(12)
    for _ in range(2):
        began = time.monotonic()
        assert_whole(streamed(proxy.url, body), body)
        assert time.monotonic() - began < 3
    if "first_ms" in fault:
        good.control(**fault)
        status, _, answer = proxy.ask(body)
        assert status == 504
        assert "0.5 s" in answer["error"]["message"]


def test_nobody_is_there(make_engine, make_proxy):
    proxy = make_proxy("--wait-timeout=0.3")
    for path in ("/health", "/healthcheck"):
        assert ask(proxy.url + path)[0] == 503
    status, headers, answer = proxy.ask(greedy(5))
    assert status == 503
    assert "0.3 s" in answer["error"]["message"]
    assert headers["X-Request-Id"]
    assert ask(proxy.url + "/v1/models")[0] == 503


def test_waits_for_an_instance_that_comes_back(make_engine, make_proxy):
    engine = make_engine(gap_ms=20)
    proxy = make_proxy(decode=[engine])
    body = greedy(30)

    async def run():
        task = asyncio.create_task(stream(proxy.url, body))
        await asyncio.sleep(0.3)
        engine.kill()
        await asyncio.to_thread(engine.start)
        return await task

    assert_whole(asyncio.run(run()), body)


def test_models_and_health(make_engine, make_proxy):
    proxy = make_proxy(prefill=[make_engine()], decode=[make_engine()])
    assert ask(proxy.url + "/v1/models")[2]["data"][0]["id"] == "stub"
    for path in ("/health", "/healthcheck"):
        assert ask(proxy.url + path)[::2] == (200, {"status": "ok", "prefill_instances": 1, "decode_instances": 1})


def test_bad_bodies(make_engine, make_proxy):
    proxy = make_proxy(decode=[make_engine()])
    for path in ("/v1/completions", "/v1/chat/completions"):
        url = proxy.url + path
        for raw in (b"", b"{", b"[]", b"3", b'{"prompt": "\xff"}'):
            status, _, answer = ask(url, raw=raw)
            assert status == 400
            assert answer["error"]["code"] == 400
        assert ask(url, raw=b"{}", headers={"Content-Type": "text/plain"})[0] == 415
    assert ask(proxy.url + "/v1/completions")[0] == 405
    assert ask(proxy.url + "/v1/nothing")[0] == 404
    for strange in (
        {"stream": True, "prompt": None},
        {"messages": 7, "stream": True},
        {"prompt": {}, "n": "x"},
    ):
        assert ask(proxy.url + "/v1/completions", {**strange, "temperature": 0})[0] >= 400
    assert ask(proxy.url + "/v1/completions", {"prompt": [], "temperature": 0, "stream": True})[0] == 200


def test_a_large_body(make_engine, make_proxy):
    proxy = make_proxy(decode=[make_engine()])
    body = greedy(4, "x" * (8 << 20))
    assert proxy.ask(body)[2]["choices"][0]["text"] == expected(body)


def test_a_client_that_goes_away_in_mid_stream(make_engine, make_proxy):
    engine = make_engine(gap_ms=30)
    proxy = make_proxy(decode=[engine])
    streamed(proxy.url, greedy(1000), stop_after=4)
    wait_until(lambda: engine.seen()["cancelled"] == 1, 2, "the cancellation")
    assert proxy.metric("mooncake_proxy_client_disconnects_total") == 1
    assert proxy.metric("mooncake_proxy_in_flight") == 0


def test_a_client_that_does_not_read(make_engine, make_proxy):
    """It is dropped at the limit between chunks, and no other instance is troubled."""
    engine = make_engine(gap_ms=0)
    proxy = make_proxy("--chunk-timeout=0.5", decode=[engine])
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, blocksize=1024)
    body = json.dumps({**greedy(60_000, "x" * 20), "temperature": 1, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    wait_until(lambda: engine.seen()["cancelled"] == 1, 20, "the cancellation")
    wait_until(lambda: proxy.instance(engine)["in_flight"] == 0)
    assert len(engine.bodies()) == 1
    connection.close()


def test_metrics(make_engine, make_proxy):
    proxy = make_proxy(decode=[make_engine()])
    assert isinstance(streamed(proxy.url, greedy(5)), Streamed)
    assert proxy.metric("mooncake_proxy_requests_total", route="/v1/completions", status="200") == 1
    assert proxy.metric("mooncake_proxy_time_to_first_token_seconds_count", route="/v1/completions") == 1
    assert proxy.metric("mooncake_proxy_added_latency_seconds_count") == 1
    assert 0 < proxy.metric("mooncake_proxy_added_latency_seconds_sum") < 0.1
    assert "mooncake_proxy_instance_ready{" in ask(proxy.url + "/metrics")[2]
