"""The two halves of a request, and prefill instances that fail."""

import asyncio
import signal
import time

import pytest

from tests.processes import wait_until
from tests.proxy.processes import assert_whole, greedy, greedy_chat, http, stream, streamed

QUICK = ("--health-interval=0.2", "--health-timeout=0.4", "--health-failures=2")


@pytest.mark.parametrize("make_body", [greedy, greedy_chat])
def test_straight(make_engine, make_proxy, make_body):
    prefill, decode = make_engine(first_ms=50), make_engine()
    proxy = make_proxy(prefill=[(prefill, True)], decode=[decode])
    body = make_body(12, stop=["@@"], stop_token_ids=[9], min_tokens=3, stream_options={"include_usage": True})
    if "messages" in body:
        body["max_completion_tokens"] = 12
    answer = streamed(proxy.url, body)
    assert_whole(answer, body)
    (first,), (second,) = prefill.bodies(), decode.bodies()
    given, taken = first.pop("kv_transfer_params"), second.pop("kv_transfer_params")
    transfer = given.pop("transfer_id")
    assert given == {"do_remote_decode": True, "do_remote_prefill": False}
    assert taken == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_bootstrap_addr": prefill.url,
        "remote_engine_id": http(prefill.url + "/query")[2]["0"]["engine_id"],
    }
    assert (first["stream"], first["max_tokens"], first["ignore_eos"]) == (False, 1, True)
    assert not {"stop", "stop_token_ids", "min_tokens", "stream_options"} & set(first)
    assert first.get("max_completion_tokens", 1) == 1
    assert {**second, "return_token_ids": True} == {**body, "stream": True, "return_token_ids": True}
    assert prefill.seen()["requests"][0]["headers"]["x-data-parallel-rank"] == "0"
    assert answer.headers["X-Request-Id"]
    for engine in (prefill, decode):
        assert engine.seen()["requests"][0]["headers"]["x-request-id"] == answer.headers["X-Request-Id"]


@pytest.mark.parametrize("returned", [True, False])
def test_through_the_pool(make_engine, make_proxy, returned):
    prefill, decode = make_engine(returned_params=returned), make_engine()
    proxy = make_proxy(prefill=[prefill], decode=[decode])
    body = greedy(12)
    assert_whole(streamed(proxy.url, body), body)
    assert proxy.ask(body)[0] == 200
    for first, second in zip(prefill.bodies(), decode.bodies(), strict=True):
        assert first["kv_transfer_params"]["do_remote_decode"] is True
        assert first["max_tokens"] == 1
        assert ("kv_transfer_params" in second) == returned
        assert not returned or second["kv_transfer_params"]["do_remote_prefill"] is True
    result = "with_params" if returned else "without_params"
    assert proxy.metric("mooncake_proxy_prefills_total", result=result) == 2


def test_no_prefill_instances(make_engine, make_proxy):
    decode = make_engine()
    proxy = make_proxy(decode=[decode])
    body = greedy(12)
    assert_whole(streamed(proxy.url, body), body)
    assert "kv_transfer_params" not in decode.bodies()[0]


@pytest.mark.parametrize("change", [{"n": 2}, {"prompt": ["a", "b"]}])
def test_several_sequences_cannot_go_straight(make_engine, make_proxy, change):
    """One transfer id hands over one sequence: the second would wait for ever."""
    prefill, decode = make_engine(), make_engine(status=418)  # the stub cannot answer them either
    proxy = make_proxy(prefill=[(prefill, True)], decode=[decode])
    assert proxy.ask({**greedy(5), **change})[0] == 418
    assert not prefill.bodies()
    assert "kv_transfer_params" not in decode.bodies()[0]


@pytest.mark.parametrize("straight", [True, False])
@pytest.mark.parametrize("fault", [{"status": 500}, {"drop_after": 0}, {"kill_after": 0}])
def test_failed_prefill_is_done_elsewhere_or_by_decode(make_engine, make_proxy, straight, fault):
    first, second, decode = make_engine(**fault), make_engine(), make_engine()
    proxy = make_proxy(prefill=[(first, straight), (second, straight)], decode=[decode])
    body = greedy(12)
    for _ in range(2):
        assert_whole(streamed(proxy.url, body), body)
    assert len(second.bodies()) == 2
    assert proxy.metric("mooncake_proxy_retries_total", role="prefill") >= 1
    second.control(**fault)
    for _ in range(2):
        before = len(decode.bodies())
        assert_whole(streamed(proxy.url, body), body)
        # decode may hear last of the half whose prefill was lost: that went out beside it, on another connection
        assert any("kv_transfer_params" not in asked for asked in decode.bodies()[before:])


def test_straight_prefill_that_cannot_send(make_engine, make_proxy):
    """A prefill half that ended by a stop token: MooncakeConnector sends nothing, decode would wait for ever."""
    prefill, decode = make_engine(prefill_finish="stop"), make_engine(first_ms=300)
    proxy = make_proxy(prefill=[(prefill, True)], decode=[decode])
    body = greedy(12)
    assert_whole(streamed(proxy.url, body), body)
    assert "kv_transfer_params" not in decode.bodies()[-1]


@pytest.mark.parametrize("straight", [True, False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_prefill_lost_in_the_middle(make_engine, make_proxy, straight, number):
    """Decode waits for it; the request goes on without."""
    prefill, decode = make_engine(first_ms=30_000), make_engine()
    proxy = make_proxy(*QUICK, prefill=[(prefill, straight)], decode=[decode])
    body = greedy(12)

    async def run():
        task = asyncio.create_task(stream(proxy.url, body))
        await asyncio.sleep(0.3)
        prefill.signal(number)
        began = time.monotonic()
        return await task, time.monotonic() - began

    answer, took = asyncio.run(run())
    assert_whole(answer, body)
    assert took < 4
    wait_until(lambda: decode.seen()["active"] == 0, what="no decode half that waits for ever")


def test_prefill_restarted_on_its_port(make_engine, make_proxy):
    """Its new engine id is used (a stale one would leave decode waiting)."""
    prefill, decode = make_engine(), make_engine()
    proxy = make_proxy(prefill=[(prefill, True)], decode=[decode])
    body = greedy(12)
    assert_whole(streamed(proxy.url, body), body)
    prefill.kill()
    assert_whole(streamed(proxy.url, body), body)
    prefill.start()
    wait_until(lambda: proxy.instance(prefill)["state"] == "ready", 3, "the return")
    assert_whole(streamed(proxy.url, body), body)
    engines = [one.get("kv_transfer_params", {}).get("remote_engine_id") for one in decode.bodies()]
    assert engines[-1] == http(prefill.url + "/query")[2]["0"]["engine_id"] != engines[0]


def test_prefill_restarted_before_it_sent(make_engine, make_proxy):
    """So quickly that no health check failed."""
    prefill, decode = make_engine(sends=False), make_engine()
    proxy = make_proxy("--health-interval=1.5", prefill=[(prefill, True)], decode=[decode])
    body = greedy(12)

    async def run():
        task = asyncio.create_task(stream(proxy.url, body))
        await asyncio.to_thread(wait_until, prefill.bodies)
        prefill.kill()
        await asyncio.to_thread(prefill.start)
        return await task

    assert_whole(asyncio.run(run()), body)


@pytest.mark.parametrize("straight", [True, False])
def test_decode_cannot_fetch_what_prefill_made(make_engine, make_proxy, straight):
    """Its error is not the client's: it computes the prompt itself."""
    prefill, decode = make_engine(returned_params=True), make_engine(pulls=False)
    proxy = make_proxy(prefill=[(prefill, straight)], decode=[decode, make_engine(pulls=False)])
    body = greedy(12)
    for _ in range(2):
        assert_whole(streamed(proxy.url, body), body)


def test_what_prefill_should_send_never_comes(make_engine, make_proxy):
    prefill, decode = make_engine(sends=False), make_engine()
    proxy = make_proxy("--first-byte-timeout=0.4", prefill=[(prefill, True)], decode=[decode])
    body = greedy(12)
    assert_whole(streamed(proxy.url, body), body)
    assert ["kv_transfer_params" in one for one in decode.bodies()] == [True, False]


@pytest.mark.parametrize("straight", [True, False])
def test_a_refused_request_is_refused_by_prefill_too(make_engine, make_proxy, straight):
    prefill, decode = make_engine(status=400), make_engine()
    proxy = make_proxy(prefill=[(prefill, straight)], decode=[decode])
    status, _, answer = proxy.ask(greedy(5))
    assert status == 400
    assert answer["error"]["message"] == "the stub says no"
    assert proxy.metric("mooncake_proxy_retries_total") == 0


@pytest.mark.parametrize("straight", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_cancels_both_halves(make_engine, make_proxy, straight, streaming):
    prefill, decode = make_engine(first_ms=20_000), make_engine(first_ms=20_000)
    proxy = make_proxy(prefill=[(prefill, straight)], decode=[decode])

    async def run():
        import aiohttp

        async with aiohttp.ClientSession() as session:
            body = {**greedy(5), "stream": streaming}
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.4), session.post(proxy.url + "/v1/completions", json=body):
                    pass

    asyncio.run(run())
    began = time.monotonic()
    engines = [prefill, decode] if straight else [prefill]
    for engine in engines:
        wait_until(lambda engine=engine: engine.seen()["cancelled"] == 1, 2, "the cancellation")
    assert time.monotonic() - began < 1
    assert all(one["in_flight"] == 0 and one["failures"] == 0 for one in proxy.instances())
    assert proxy.metric("mooncake_proxy_client_disconnects_total") == 1
