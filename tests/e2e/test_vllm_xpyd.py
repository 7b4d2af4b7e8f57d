"""Several prefill and decode instances of real vLLM behind the real proxy: exact answers, and none lost when instances
are added, killed, stopped or come back.

`XPYD_REQUESTS=200 scripts/test tests/e2e/test_vllm_xpyd.py -s` asks more than the tests do by themselves, and prints
the figures that are in docs/performance.md.  With XPYD_POOL=1 the instances also share a pool (MultiConnector).
"""

import asyncio
import os
import signal
import time
from contextlib import ExitStack

import pytest

from mooncake.cli.engine_settings import IN_TREE, OWN
from tests.e2e.deployment import Deployment, forget, from_peer, start_pool, wait_free
from tests.e2e.questions import TOKENS, all_of, chat, completion, ids_of, prompt
from tests.processes import gone, wait_until
from tests.proxy.processes import Proxy, Streamed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

REQUESTS = int(os.environ.get("XPYD_REQUESTS", "48"))
AT_ONCE = 16
FAILED = "vllm:mooncake_failed_receives_total"
MORE = 16  # tokens beyond those that are compared, so that streams are long enough to be lost

# Every fourth one is a chat; 40 to 700 tokens of prompt.
BODIES = [
    (chat if number % 4 == 3 else completion)(prompt(1000 + number, 40 + 97 * number % 660), TOKENS + MORE)
    for number in range(REQUESTS)
]


@pytest.fixture(scope="module", params=[OWN, IN_TREE], ids=["own", "vLLM's"])
def fleet(zygote, model, tmp_path_factory, request):
    """Two of each, and one that does all by itself (`alone`)."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("fleet")
        fleet = Deployment(stack, zygote, model, folder, request.param)
        fleet.alone = fleet.plain()
        fleet.start(2, 2, pool=start_pool(stack, folder) if os.environ.get("XPYD_POOL") else None)
        fleet.alone.wait_ready()
        yield fleet


@pytest.fixture(scope="module")
def alone(fleet):
    """The answers of two runs of the instance alone."""
    runs = []
    for _ in range(2):
        forget(fleet.alone)
        runs.append(ask_all("one instance", fleet.alone.url))
    return runs


@pytest.fixture
def front(fleet, cleanup):
    """Makes a proxy in front of the first so many of each, which have forgotten every prompt."""

    def make(prefill: int, decode: int) -> Proxy:
        servers = (*fleet.prefill, *fleet.decode)
        for dead in [server for server in servers if gone(server.pid)]:  # by a test that failed
            dead.start()
            dead.wait_ready()
        forget(*servers)
        proxy = Proxy(prefill=[(one, True) for one in fleet.prefill[:prefill]], decode=fleet.decode[:decode])
        cleanup.callback(proxy.stop)
        return proxy

    return make


def ask_all(what: str, url: str) -> list[list[int]]:
    """Every answer's tokens; none may have failed."""
    began = time.monotonic()
    answers = asyncio.run(all_of(url, BODIES, AT_ONCE))
    tokens = tokens_of(answers)
    print(f"\n{what}: {len(answers)} answers in {time.monotonic() - began:.1f} s, {AT_ONCE} at once, none failed")
    return tokens


def tokens_of(answers: list[Streamed]) -> list[list[int]]:
    tokens = [ids_of(answer) for answer in answers]
    assert {len(one) for one in tokens} == {TOKENS + MORE}
    assert all(len(answer.ids) == 1 for answer in answers), "one stream has one id, also when it was resumed"
    return tokens


def equal(one: list[list[int]], other: list[list[int]]) -> int:
    return sum(first[:TOKENS] == second[:TOKENS] for first, second in zip(one, other, strict=True))


def assert_as_alone(tokens: list[list[int]], alone: list[list[list[int]]]) -> None:
    """The first tokens are those of the instance alone as often as its two runs agree with each other."""
    by_itself, through = equal(*alone), equal(tokens, alone[0])
    print(f"the first {TOKENS} tokens are equal in {through}; in two runs of one instance in {by_itself}")
    assert through >= by_itself


@pytest.mark.parametrize("each", [1, 2], ids=["1P1D", "2P2D"])
def test_answers_are_those_of_one_instance(fleet, alone, front, each):
    proxy = front(each, each)
    before = [(from_peer(server), server.metric(FAILED)) for server in fleet.decode]
    assert_as_alone(ask_all(f"{each}P{each}D", proxy.url), alone)
    assert proxy.metric("mooncake_proxy_prefills_total", result="straight") == REQUESTS
    assert proxy.metric("mooncake_proxy_retries_total") == 0
    for server, (tokens, failed) in zip(fleet.decode[:each], before, strict=False):
        assert from_peer(server) > tokens
        assert server.metric(FAILED) == failed
    wait_free(*fleet.prefill, *fleet.decode, limit=5)


def test_killing_one_of_each_fails_no_request(fleet, alone, front):
    proxy = front(2, 2)
    prefill, decode = fleet.prefill[1], fleet.decode[1]
    live: list[Streamed] = []

    async def ask_and_kill() -> list[Streamed]:
        asking = asyncio.create_task(all_of(proxy.url, BODIES, AT_ONCE, live))
        await until(lambda: served(proxy) >= REQUESTS // 4)
        prefill.signal(signal.SIGKILL)
        await until(lambda: served(proxy) >= REQUESTS // 3 and decode.metric("vllm:num_requests_running") >= 2)
        begun = decode.metric("vllm:generation_tokens_total")
        await until(lambda: decode.metric("vllm:generation_tokens_total") >= begun + 8)  # some have been sent
        await until(lambda: stopped_in_mid_stream(decode, live))
        decode.signal(signal.SIGKILL)
        return await asking

    assert_as_alone(tokens_of(asyncio.run(ask_and_kill())), alone)
    resumed = proxy.metric("mooncake_proxy_resumptions_total", result="resumed")
    lost = proxy.metric("mooncake_proxy_retries_total")
    print(f"one prefill and one decode instance were killed: {lost:.0f} tries lost, {resumed:.0f} streams resumed")
    assert resumed > 0
    assert proxy.metric("mooncake_proxy_resumptions_total", result="failed") == 0
    assert {proxy.instance(one)["state"] for one in (prefill, decode)} == {"ejected"}

    # They come back on the same ports; prefill has a new engine id.
    prefill.start()
    decode.start()
    for server in (prefill, decode):
        server.wait_ready()
        wait_until(lambda: proxy.instance(server)["state"] == "ready", what="its return")  # noqa: B023
    assert_as_alone(ask_all("after their return", proxy.url), alone)
    assert from_peer(decode) > 0
    assert prefill.metric("vllm:mooncake_transfer_seconds_count") > 0


def test_a_stopped_prefill_holds_up_nobody_for_long(fleet, alone, front):
    """It answers nothing and breaks no connection; its decode halves would wait for minutes."""
    proxy = front(2, 2)

    async def ask_and_stop() -> list[Streamed]:
        asking = asyncio.create_task(all_of(proxy.url, BODIES, AT_ONCE))
        await until(lambda: served(proxy) >= REQUESTS // 4)
        fleet.prefill[1].signal(signal.SIGSTOP)
        return await asking

    try:
        began = time.monotonic()
        assert_as_alone(tokens_of(asyncio.run(ask_and_stop())), alone)
        print(f"one prefill instance stood still: all answers after {time.monotonic() - began:.1f} s")
    finally:
        fleet.prefill[1].signal(signal.SIGCONT)
    wait_until(lambda: proxy.instance(fleet.prefill[1])["state"] == "ready", what="its return")


def test_added_instances_take_load_within_five_seconds(fleet, front):
    proxy = front(1, 1)

    async def ask_and_add() -> list[float]:
        asking = asyncio.create_task(all_of(proxy.url, [completion(prompt(n), 200) for n in range(100)], 8))
        await until(lambda: served(proxy) >= 1)
        took = []
        for role, server in (("prefill", fleet.prefill[1]), ("decode", fleet.decode[1])):
            began = time.monotonic()
            port = {"bootstrap_port": server.bootstrap_port} if role == "prefill" else {}
            assert (await asyncio.to_thread(proxy.change, "add", role, server, **port))[0] == 200
            await until(lambda: proxy.instance(server)["in_flight"] > 0)  # noqa: B023
            took.append(time.monotonic() - began)
        asking.cancel()
        return took

    took = asyncio.run(ask_and_add())
    print(f"\nadded instances had their first request after {took[0]:.2f} s (prefill), {took[1]:.2f} s (decode)")
    assert max(took) < 5
    wait_free(*fleet.prefill, *fleet.decode, limit=15)


def served(proxy: Proxy) -> int:
    """Whole answers of decode instances."""
    return sum(one["served"] for one in proxy.instances() if one["role"] == "decode")


def stopped_in_mid_stream(decode, live: list[Streamed]) -> bool:
    """Stop it; if then no stream stands still of which some has come, let it go on."""
    decode.signal(signal.SIGSTOP)
    begun = [(one, len(one.raw)) for one in live if one.raw and not one.done]
    time.sleep(0.25)  # the other instance's streams go on
    if any(len(one.raw) == length for one, length in begun):
        return True
    decode.signal(signal.SIGCONT)
    return False


async def until(condition) -> None:
    """As wait_until, while requests run."""
    await asyncio.to_thread(wait_until, condition, 60)
