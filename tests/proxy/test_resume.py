"""A decode instance that is lost in mid-stream."""

import asyncio
import signal
import threading
import time

import pytest

from tests.processes import wait_until
from tests.proxy.processes import PROMPT, assert_whole, expected, greedy, greedy_chat, stream, streamed
from tests.proxy.stub_engine import ids_of, is_held

FAULTS = ("kill_after", "drop_after", "end_after", "error_after")


@pytest.fixture
def pair(make_engine):
    """Two engines; the first one is asked first and misbehaves."""

    def make(**faults):
        return make_engine(**faults), make_engine()

    return make


@pytest.mark.parametrize("make_body", [greedy, greedy_chat])
def test_greedy_streams_are_resumed(pair, make_proxy, make_body):
    first, second = pair()
    proxy = make_proxy(decode=[first, second])
    for number, (fault, after) in enumerate((fault, after) for fault in FAULTS for after in (1, 9)):
        first.control(**{fault: after})
        body = make_body(30, stream_options={"include_usage": True})
        for _ in range(2):  # with two instances in turn one of them meets the fault
            answer = streamed(proxy.url, body)
            assert_whole(answer, body)
            assert answer.usage["completion_tokens"] == 30
            assert answer.usage["total_tokens"] == answer.usage["prompt_tokens"] + 30
        assert proxy.metric("mooncake_proxy_resumptions_total", result="resumed") >= number + 1, (fault, after)
        if fault == "kill_after":
            first.start()
            wait_until(lambda: proxy.instance(first)["state"] == "ready")
        first.control(**{fault: -1})
    rest = [one for one in second.bodies() if _prompt(one) != _prompt(body)]
    assert len(rest) >= 4
    assert all(one["max_tokens"] < 30 for one in rest)
    assert all(isinstance(one["prompt"], list) for one in rest), "the engine's own token ids"


def _prompt(body):
    return body.get("prompt") or body["messages"]


@pytest.mark.parametrize("make_body", [greedy, greedy_chat])
@pytest.mark.parametrize("flags", [(), ("--resume=text",)])
def test_by_text_where_the_engine_tells_no_ids(pair, make_proxy, make_body, flags):
    first, second = pair(drop_after=7, ids=False)
    second.control(ids=False)
    proxy = make_proxy(*flags, decode=[first, second])
    body = make_body(25)
    for _ in range(2):
        answer = streamed(proxy.url, body)
        assert answer.text == expected(body)
        assert answer.done
        assert len(answer.ids) == 1
    assert all(bool(one.get("return_token_ids")) == (not flags) for one in first.bodies())
    if "messages" in body:
        rest = next(one for one in second.bodies() if len(one["messages"]) == 2)
        assert rest["continue_final_message"]
        assert rest["add_generation_prompt"] is False


@pytest.mark.parametrize("picture", [True, False])
def test_chats_of_several_parts(pair, make_proxy, picture):
    """Token ids do not say what a picture shows: those chats are resumed as chats."""
    first, second = pair(drop_after=7)
    proxy = make_proxy(decode=[first, second])
    parts = [{"type": "text", "text": "What is this?"}]
    if picture:
        parts.append({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    body = greedy_chat(25, parts)
    for _ in range(2):
        answer = streamed(proxy.url, body)
        assert answer.text == expected(body)
        assert answer.done
    rest = [one for one in second.bodies() if one.get("messages") != body["messages"]]
    assert {one.get("continue_final_message", False) for one in rest} == {picture}


def test_stop_strings(pair, make_proxy):
    """Text that is held back for them is neither lost nor repeated."""
    body = greedy(60)
    stop = expected(body)[40:43]
    whole = expected(body)[: expected(body).index(stop)]
    first, second = pair(drop_after=20)
    proxy = make_proxy(decode=[first, second])
    for _ in range(2):
        answer = streamed(proxy.url, {**body, "stop": [stop]})
        assert answer.text == whole
        assert answer.finish == ["stop"]
        assert answer.done


def test_lost_again_and_again(make_engine, make_proxy):
    engines = [make_engine(drop_after=6) for _ in range(3)]
    proxy = make_proxy(decode=engines)
    body = greedy(40, stream_options={"include_usage": True})
    answer = streamed(proxy.url, body)
    assert_whole(answer, body)
    assert answer.usage["completion_tokens"] == 40
    assert proxy.metric("mooncake_proxy_resumptions_total", result="resumed") >= 5


@pytest.mark.parametrize("after", [20, 21])
def test_only_the_end_is_missing(make_engine, make_proxy, after):
    """The final chunk came, the usage (20) or only [DONE] (21) did not."""
    engine = make_engine(end_after=after)
    proxy = make_proxy(decode=[engine])
    body = greedy(20, stream_options={"include_usage": True})
    answer = streamed(proxy.url, body)
    assert_whole(answer, body)
    assert answer.usage == {"prompt_tokens": len(PROMPT), "completion_tokens": 20, "total_tokens": len(PROMPT) + 20}
    assert len(engine.bodies()) == 1


def test_token_ids_that_were_asked_for(pair, make_proxy):
    first, second = pair(drop_after=9)
    proxy = make_proxy(decode=[first, second])
    body = greedy(20, return_token_ids=True)
    for _ in range(2):
        answer = streamed(proxy.url, body)
        assert_whole(answer, body)
        assert answer.raw.count(b"prompt_token_ids") == 1
        assert answer.raw.count(b'"token_ids"') >= 20


@pytest.mark.parametrize("make_body", [greedy, greedy_chat])
@pytest.mark.parametrize("more", [1, 2])
def test_each_token_is_told_once_wherever_a_stream_is_lost(make_engine, make_proxy, make_body, more):
    """Also one whose text had not come yet, and also if the stream is lost again soon after."""
    engines = [make_engine(), make_engine()]
    proxy = make_proxy(decode=engines)
    body = make_body(30, return_token_ids=True, stream_options={"include_usage": True})
    tokens = ids_of(expected(body))
    assert any(map(is_held, tokens[:-1]))
    for after in range(1, 31):
        for engine in engines:
            engine.control(drop_after=after, times=1)
        engines[0].control(drop_after=more if after > 15 else after)
        answer = streamed(proxy.url, body)
        assert_whole(answer, body)
        assert [token for one in answer.choices for token in one.get("token_ids") or ()] == tokens, after
        assert answer.usage["completion_tokens"] == len(tokens)
    assert proxy.metric("mooncake_proxy_resumptions_total", result="failed") == 0
    assert proxy.metric("mooncake_proxy_resumptions_total", result="resumed") >= 30


@pytest.mark.parametrize("fault", ["drop_after", "end_after", "error_after"])
def test_what_cannot_be_resumed_ends_with_an_error_event(make_engine, make_proxy, fault):
    """... and never with [DONE]."""
    proxy = make_proxy(decode=[make_engine(**{fault: 5}), make_engine(**{fault: 5})])
    changes = (
        {"temperature": 0.7},
        {"temperature": None},
        {"presence_penalty": 1},
        {"n": 2},
        {"response_format": {"type": "json_object"}},
        {"stop": ["?!"], "return_token_ids": True},
    )
    for number, change in enumerate(changes):
        answer = streamed(proxy.url, {**greedy(20), **change})
        assert answer.status == 200
        assert not answer.cut
        assert answer.error["code"] >= 500
        assert "error" in answer.events[-1]
        assert b"[DONE]" not in answer.raw
        assert proxy.metric("mooncake_proxy_resumptions_total", result="failed") == number + 1


def test_sampled_chats_are_repeated_before_their_first_token(pair, make_proxy):
    first, second = pair(drop_after=1)
    proxy = make_proxy(decode=[first, second])
    body = greedy_chat(20, temperature=1.0)
    for _ in range(2):
        assert_whole(streamed(proxy.url, body), body)


def test_answers_in_one_piece_are_repeated(pair, make_proxy):
    first, second = pair(drop_after=0)
    proxy = make_proxy(decode=[first, second])
    for temperature in (0, 1):
        for _ in range(2):
            status, _, answer = proxy.ask({**greedy(20), "temperature": temperature})
            assert status == 200
            assert answer["choices"][0]["text"] == expected(greedy(20))
    assert first.bodies()


@pytest.mark.slow
def test_kill_9_and_stop_in_mid_stream(make_engine, make_proxy):
    engines = [make_engine(gap_ms=30) for _ in range(3)]
    flags = ("--health-interval=0.2", "--health-timeout=0.5", "--health-failures=2")
    proxy = make_proxy(*flags, decode=engines)
    body = greedy(60)

    async def run():
        streams = [asyncio.create_task(stream(proxy.url, body)) for _ in range(6)]
        await asyncio.sleep(0.5)
        engines[0].signal(signal.SIGKILL)
        engines[1].signal(signal.SIGSTOP)
        began = time.monotonic()
        answers = await asyncio.gather(*streams)
        return answers, time.monotonic() - began

    answers, took = asyncio.run(run())
    for answer in answers:
        assert_whole(answer, body)
    assert took < 8
    assert proxy.instance(engines[0])["state"] == "ejected"
    assert proxy.instance(engines[1])["state"] == "ejected"
    engines[1].signal(signal.SIGCONT)
    wait_until(lambda: proxy.instance(engines[1])["state"] == "ready", 3, "the return")


@pytest.mark.slow
def test_200_streams_while_engines_die(make_engine, make_proxy):
    """Prefill and decode instances are killed and come back; no greedy request fails."""
    prefill = [make_engine(gap_ms=5) for _ in range(2)]
    decode = [make_engine(gap_ms=40) for _ in range(3)]
    proxy = make_proxy(prefill=[(one, True) for one in prefill], decode=decode)
    bodies = [
        (greedy if number % 2 else greedy_chat)(40, f"prompt number {number}", stream_options={"include_usage": True})
        for number in range(200)
    ]

    def chaos():
        for engine in (decode[0], prefill[0], decode[1]):
            time.sleep(0.4)
            engine.kill()
            time.sleep(0.1)
            engine.start()
            engine.control(gap_ms=40)

    async def run():
        import aiohttp

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            tasks = []
            for body in bodies:
                tasks.append(asyncio.create_task(stream(proxy.url, body, session)))
                await asyncio.sleep(0.005)
            return await asyncio.gather(*tasks)

    thread = threading.Thread(target=chaos)
    thread.start()
    answers = asyncio.run(run())
    thread.join()
    for answer, body in zip(answers, bodies, strict=True):
        assert_whole(answer, body)
        assert answer.usage["completion_tokens"] == 40
    assert proxy.metric("mooncake_proxy_resumptions_total", result="resumed") >= 1
    assert all(one["in_flight"] == 0 for one in proxy.instances())
