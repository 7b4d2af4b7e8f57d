"""Prompt KV straight from a prefill to a decode instance of real vLLM, behind the real proxy.

`mooncake.vllm`'s MooncakeConnector and vLLM's own: alone, and in MultiConnector with the store connector of each.
"""

import asyncio
import signal
import time
from collections import Counter
from contextlib import ExitStack

import pytest

from mooncake.cli.engine_settings import CONSUMER, IN_TREE, OWN, PRODUCER
from tests.e2e.deployment import ABORT_LIMIT, Deployment, from_peer, held, wait_free
from tests.e2e.questions import TOKENS, all_of, chat, completion, ids_of, prompt
from tests.e2e.servers import BLOCK
from tests.processes import wait_until
from tests.proxy.processes import Streamed, http, stream, streamed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(240)]

BLOCK_BYTES = BLOCK * 4096  # of the tiny model: 4 KiB a token


def computed(server) -> float:
    return server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


def counted(server) -> Counter:
    """What it did for requests, and its transfers."""
    return Counter(
        computed=computed(server),
        from_peer=from_peer(server),
        sent=server.metric("vllm:mooncake_transfer_seconds_count"),
        bytes=server.metric("vllm:mooncake_transfer_bytes_sum"),
        failed=server.metric("vllm:mooncake_failed_transfers_total"),
    )


@pytest.fixture(scope="module", params=[OWN, IN_TREE], ids=["own", "vLLM's"])
def pair(zygote, model, tmp_path_factory, request):
    """One prefill, one decode instance, the proxy, and `alone`: an instance without any connector."""
    with ExitStack() as stack:
        deployment = Deployment(stack, zygote, model, tmp_path_factory.mktemp("pair"), request.param)
        deployment.own = request.param == OWN
        deployment.alone = deployment.plain()
        deployment.start(workers=2)
        deployment.alone.wait_ready()
        yield deployment


def test_the_prompt_comes_from_prefill(pair):
    (prefill,), (decode,) = pair.prefill, pair.decode
    ids = prompt(1)
    expected = pair.alone.ask(ids, TOKENS).token_ids
    before = {server: counted(server) for server in (prefill, decode)}
    straight = pair.proxy.metric("mooncake_proxy_prefills_total", result="straight")

    status, _, answer = http(f"{pair.proxy.url}/v1/completions", completion(ids))
    assert status == 200
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == len(ids)
    by_prefill, by_decode = Counter(computed=len(ids), sent=1, bytes=21 * BLOCK_BYTES), Counter(from_peer=len(ids))
    wait_until(lambda: counted(decode) - before[decode] == by_decode, what="the metrics of decode")
    wait_until(lambda: counted(prefill) - before[prefill] == by_prefill, what="the metrics of prefill")
    assert pair.proxy.metric("mooncake_proxy_prefills_total", result="straight") == straight + 1


@pytest.mark.parametrize("make", [completion, chat])
def test_streamed_answers_are_those_of_one_instance(pair, make):
    body = make(prompt(2))
    alone = streamed(pair.alone.url, body)
    before = from_peer(pair.decode[0])
    through = streamed(pair.proxy.url, {**body, "stream_options": {"include_usage": True}})
    assert ids_of(through) == ids_of(alone)
    assert len(ids_of(through)) == TOKENS
    assert through.text == alone.text
    assert from_peer(pair.decode[0]) - before >= through.usage["prompt_tokens"] - BLOCK


def test_many_at_once(pair):
    bodies = [completion(prompt(100 + number, 40 + 30 * number)) for number in range(12)]
    alone = asyncio.run(all_of(pair.alone.url, bodies))
    through = asyncio.run(all_of(pair.proxy.url, bodies))
    assert [ids_of(one) for one in through] == [ids_of(one) for one in alone]
    wait_free(*pair.prefill, *pair.decode, limit=5)


def test_a_first_token_that_stops(pair):
    """vLLM's connector sends nothing of a prefill that ended by a stop token; the proxy sees to it that none does."""
    ids = prompt(3)
    first = pair.alone.ask(ids, 1).token_ids
    before = from_peer(pair.decode[0])
    for body in (completion(ids, stop_token_ids=first), completion(ids, stop=[f"w{first[0]}"])):
        answer = streamed(pair.proxy.url, body)
        assert ids_of(answer) == first
        assert answer.finish == ["stop"]
    assert from_peer(pair.decode[0]) > before
    wait_free(*pair.prefill, *pair.decode, limit=5)


def test_a_first_token_that_stops_without_the_proxy(pair):
    if not pair.own:
        pytest.skip("vLLM's connector sends nothing then")
    ids = prompt(31)
    first = pair.alone.ask(ids, 1).token_ids
    expected = pair.alone.ask(ids, TOKENS).token_ids
    handing = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "stops"}
    half = completion(ids, 1, stop_token_ids=first, kv_transfer_params=handing)
    status, _, answer = http(f"{pair.prefill[0].url}/v1/completions", half)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")
    before = from_peer(pair.decode[0])
    status, _, answer = http(f"{pair.decode[0].url}/v1/completions", decode_half(pair, "stops", ids))
    assert answer["choices"][0]["token_ids"] == expected
    assert from_peer(pair.decode[0]) - before == len(ids)
    wait_free(*pair.prefill, *pair.decode, limit=3)


@pytest.mark.parametrize("events", [0, 1, 3])
def test_a_client_that_goes_away_frees_both(pair, events):
    """0: while prefill computes; later: while decode streams."""
    body = completion(prompt(10 + events, 3000), 1000)
    if events:
        streamed(pair.proxy.url, body, stop_after=events)
        wait_free(*pair.decode, limit=3)  # long before the answer's end
    else:
        asyncio.run(leave_after(pair.proxy.url, body, 0.1))
    wait_free(*pair.prefill, *pair.decode, limit=3 if pair.own else ABORT_LIMIT + 5)
    assert http(f"{pair.proxy.url}/v1/completions", completion(prompt(9), 4))[0] == 200


async def leave_after(url: str, body: dict, seconds: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await stream(url, body)


def test_prefilled_blocks_that_nobody_fetches_are_freed(pair):
    """VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, on the side of prefill."""
    (prefill,) = pair.prefill
    expired = prefill.metric("vllm:mooncake_expired_requests_total")
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "nobody"}
    assert http(f"{prefill.url}/v1/completions", completion(prompt(4), 1, kv_transfer_params=params))[0] == 200
    assert prefill.metric("vllm:kv_cache_usage_perc") > 0
    wait_free(prefill, limit=ABORT_LIMIT + 5)
    assert prefill.metric("vllm:mooncake_expired_requests_total") == expired + 1


def decode_half(pair: Deployment, transfer: str, ids: list[int], engine: str = "") -> dict:
    """What the proxy would send to decode."""
    registry = f"http://127.0.0.1:{pair.prefill[0].bootstrap_port}"
    (known,) = http(f"{registry}/query")[2].values()
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_bootstrap_addr": registry,
        "remote_engine_id": engine or known["engine_id"],
    }
    return completion(ids, kv_transfer_params=params)


def test_decode_computes_what_never_comes(pair):
    """The same on the side of decode, with `kv_load_failure_policy` recompute."""
    (decode,) = pair.decode
    ids = prompt(5)
    failed = decode.metric("vllm:mooncake_failed_receives_total")
    status, _, answer = http(f"{decode.url}/v1/completions", decode_half(pair, "never", ids))
    assert status == 200
    assert answer["choices"][0]["token_ids"] == pair.alone.ask(ids, TOKENS).token_ids
    assert decode.metric("vllm:mooncake_failed_receives_total") == failed + 1
    wait_free(decode, limit=5)


def test_decode_does_not_wait_for_an_engine_that_is_gone(pair):
    ids = prompt(51)
    began = time.monotonic()
    status, _, answer = http(f"{pair.decode[0].url}/v1/completions", decode_half(pair, "gone", ids, "a-former-engine"))
    assert status == 200
    assert answer["choices"][0]["token_ids"] == pair.alone.ask(ids, TOKENS).token_ids
    assert time.monotonic() - began < ABORT_LIMIT
    wait_free(*pair.decode, limit=5)


def test_prefill_dies_while_it_computes(pair, cleanup, zygote, model, tmp_path):
    """Without a proxy that notices; and under vLLM's default policy, `fail`, with ours."""
    if not pair.own:
        pytest.skip("decode then waits for a minute more than the limit")
    other = Deployment(cleanup, zygote, model, tmp_path)
    other.prefill = [other.engine(PRODUCER)]
    decode = other.failing_decode()
    for server in (*other.prefill, decode):
        server.wait_ready()
    ids = prompt(52, 3000)
    expected = pair.alone.ask(ids, TOKENS).token_ids
    half = decode_half(other, "dies", ids)

    async def ask_and_kill() -> Streamed:
        asking = asyncio.create_task(stream(f"{decode.url}", half))
        handing = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "dies"}
        asyncio.get_running_loop().run_in_executor(
            None, http, f"{other.prefill[0].url}/v1/completions", completion(ids, 1, kv_transfer_params=handing)
        ).add_done_callback(lambda done: done.exception())
        await asyncio.to_thread(wait_until, lambda: held(other.prefill[0]) > 0, 10, "prefill's start")
        other.prefill[0].signal(signal.SIGKILL)
        return await asking

    began = time.monotonic()
    assert ids_of(asyncio.run(ask_and_kill())) == expected
    assert time.monotonic() - began < ABORT_LIMIT + 10
    wait_free(decode, limit=3)


@pytest.mark.parametrize("pool_first", [False, True], ids=["p2p first", "pool first"])
def test_both_connectors(zygote, model, pair, pool, cleanup, tmp_path, pool_first):
    both = Deployment(cleanup, zygote, model, tmp_path, OWN if pair.own else IN_TREE)
    both.start(pool=pool, pool_first=pool_first)
    (prefill,), (decode,) = both.prefill, both.decode
    ids = prompt(6)
    expected = pair.alone.ask(ids, TOKENS).token_ids

    assert ids_of(streamed(both.proxy.url, completion(ids))) == expected
    if not pool_first:  # else decode finds what prefill has saved by the time it looks
        assert from_peer(decode) == len(ids)
        assert computed(decode) == 0
    wait_until(lambda: pool.metric("master_key_count") >= 20, what="prefill's blocks in the pool")

    # Another prefill instance finds in the pool what the first one computed, and hands it over.
    other = both.engine(PRODUCER, pool, pool_first=pool_first)
    fresh = both.engine(CONSUMER, pool, pool_first=pool_first)
    other.wait_ready()
    fresh.wait_ready()
    for change, role, servers in (("add", "prefill", (other, prefill)), ("add", "decode", (fresh, decode))):
        assert both.proxy.change(change, role, servers[0], **port_of(servers[0]))[0] == 200
        wait_until(lambda: both.proxy.instance(servers[0])["state"] == "ready", what="the instance")  # noqa: B023
        assert both.proxy.change("remove", role, servers[1])[0] == 200
    assert ids_of(streamed(both.proxy.url, completion(ids))) == expected
    loaded = other.metric("vllm:external_prefix_cache_hits_total")
    taken = fresh.metric("vllm:external_prefix_cache_hits_total")
    assert loaded == 20 * BLOCK
    assert taken == (20 * BLOCK if pool_first else len(ids))
    assert from_peer(fresh) == (0 if pool_first else len(ids))
    wait_free(prefill, decode, other, fresh, limit=5)


def port_of(server) -> dict:
    return {"bootstrap_port": server.bootstrap_port} if server.bootstrap_port else {}
