"""Prompts from prefill's workers to decode's, over real sockets: whole, or known to have failed; and nothing stays."""

import time

import pytest

from tests.processes import wait_until
from tests.push.instances import LIMIT, Instance, known, shuffled
from tests.push.memory import BLOCK

FROM, TO = shuffled(1, 20), shuffled(2, 20)


@pytest.fixture
def pair(cleanup):
    prefill, decode = Instance(cleanup, "prefill"), Instance(cleanup, "decode")
    known(prefill)
    return prefill, decode


def whole(decode: Instance, name: str = "d") -> None:
    assert decode.wait_for(name)
    decode.check(TO)
    assert not decode.touched(TO)


@pytest.mark.parametrize("force_tcp", [False, True], ids=["cma", "tcp"])
@pytest.mark.parametrize("early", [True, False], ids=["asked early", "asked late"])
def test_a_prompt_comes(cleanup, monkeypatch, force_tcp, early):
    monkeypatch.setenv("MC_FORCE_TCP", str(int(force_tcp)))
    prefill, decode = Instance(cleanup, "prefill"), Instance(cleanup, "decode")
    known(prefill)
    if early:
        decode.pull("d", "t", prefill, TO)
        time.sleep(0.1)
        assert not decode.has("d")
    prefill.hand("p", "t", FROM)
    if not early:
        time.sleep(0.1)
        assert not prefill.has_let_go("p")
        decode.pull("d", "t", prefill, TO)
    whole(decode)
    wait_until(lambda: prefill.has_let_go("p"), 2, "prefill's blocks")
    ((_, size, _),) = prefill.counted.transfers
    assert size == 20 * sum(decode.workers[0].pulling._greet("").layers.block_bytes)


def test_layers_cross_while_others_are_computed(pair, monkeypatch):
    """What a step has computed is there before the next one; and decode need not wait for the request's end."""
    monkeypatch.setattr("mooncake.vllm.push.stepping.GROUP", 1)
    prefill, decode = pair
    decode.pull("d", "t", prefill, TO)
    prefill.begin("p", "t", 20 * BLOCK)
    for first, end in ((0, 7), (7, 14), (14, 20)):
        prefill.compute("p", FROM, first, end, pause=0.05)
        if end < 20:
            view = decode.memories[0].views
            wait_until(lambda: (view[2][TO[end - 1]] != -1).all(), 5, "the last layer")  # noqa: B023
            assert (view[0][TO[end]] == -1).all()
    whole(decode)


@pytest.mark.parametrize("kinds", [("heads first", "tokens first"), ("K and V apart", "blocks outermost")])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 2), (2, 2)])
def test_other_ranks_and_orders(cleanup, kinds, sizes):
    prefill = Instance(cleanup, "prefill", sizes[0], kind=kinds[0])
    decode = Instance(cleanup, "decode", sizes[1], kind=kinds[1])
    known(prefill)
    decode.pull("d", "t", prefill, TO)
    prefill.hand("p", "t", FROM)
    whole(decode)
    wait_until(lambda: prefill.has_let_go("p"), 2, "prefill's blocks")


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (4, 2)])
def test_replicated_heads(cleanup, sizes):
    """As MLA has them, or more ranks than heads: ranks that send nothing let go as well."""
    prefill, decode = Instance(cleanup, "prefill", sizes[0], heads=1), Instance(cleanup, "decode", sizes[1], heads=1)
    known(prefill)
    prefill.hand("p", "t", FROM)
    decode.pull("d", "t", prefill, TO)
    whole(decode)
    wait_until(lambda: prefill.has_let_go("p"), 2, "prefill's blocks")


def test_pipeline_stages(cleanup):
    prefill, decode = Instance(cleanup, "prefill", stages=3), Instance(cleanup, "decode")
    known(prefill)
    decode.pull("d", "t", prefill, TO)
    prefill.hand("p", "t", FROM)
    whole(decode)
    wait_until(lambda: prefill.has_let_go("p"), 2, "prefill's blocks")


def test_only_the_end_is_wanted(pair):
    prefill, decode = pair
    decode.pull("d", "t", prefill, TO[13:], 13)
    prefill.hand("p", "t", FROM)
    assert decode.wait_for("d")
    decode.check(TO[13:], 13)
    assert not decode.touched(TO[13:])


def test_nothing_is_wanted(pair):
    """Early or late, prefill lets go at once."""
    prefill, decode = pair
    decode.pull("d", "t", prefill, [], tokens=20 * BLOCK)
    prefill.hand("p", "t", FROM)
    prefill.hand("q", "u", FROM)
    decode.pull("e", "u", prefill, [], tokens=20 * BLOCK)
    wait_until(lambda: prefill.has_let_go("p") and prefill.has_let_go("q"), 1, "prefill's blocks")
    assert not decode.touched([])


def test_a_cancelled_pull_ends_both(pair):
    prefill, decode = pair
    decode.pull("d", "t", prefill, TO)
    prefill.begin("p", "t", 20 * BLOCK)
    prefill.compute("p", FROM, 0, 9)
    time.sleep(0.1)
    decode.cancel("d")
    assert not decode.wait_for("d", 1)
    assert decode.counted.lacking == 0  # it was not wanted
    for memory in decode.memories:
        for block in TO:
            memory.fill(block, 500)
    prefill.compute("p", FROM, 9)
    prefill.finish("p")
    wait_until(lambda: prefill.has_let_go("p"), 1, "prefill's blocks")
    for memory in decode.memories:
        for block in TO:
            memory.check(block, 500)


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_dropped_prompt_is_told_at_once(pair, asked_first):
    prefill, decode = pair
    prefill.begin("p", "t", 20 * BLOCK)
    if asked_first:
        decode.pull("d", "t", prefill, TO)
        time.sleep(0.1)
    prefill.drop("t")
    if not asked_first:
        decode.pull("d", "t", prefill, TO)
    assert not decode.wait_for("d", 1)
    assert decode.counted.lacking == 1


def test_halves_that_never_meet(pair):
    prefill, decode = pair
    decode.pull("d", "nobody's", prefill, TO)
    prefill.hand("p", "unwanted", FROM)
    assert not prefill.has_let_go("p")
    assert not decode.wait_for("d", LIMIT + 2)
    wait_until(lambda: prefill.has_let_go("p"), LIMIT + 2, "prefill's blocks")
    assert prefill.counted.late == 1
    decode.pull("e", "unwanted", prefill, TO)  # too late
    assert not decode.wait_for("e", 1)


def test_other_prompts_are_not_mixed_up(pair):
    prefill, decode = pair
    prefill.begin("p", "t", 20 * BLOCK, 7)
    decode.pull("d", "t", prefill, TO, digest=8)
    assert not decode.wait_for("d", 1)
    decode.pull("e", "u", prefill, TO[:19])
    prefill.begin("q", "u", 20 * BLOCK, 7)
    assert not decode.wait_for("e", 1)


def test_a_preempted_prompt_is_pushed_again(pair):
    prefill, decode = pair
    decode.pull("d", "t", prefill, TO)
    prefill.begin("p", "t", 20 * BLOCK)
    prefill.compute("p", FROM, 0, 12)
    prefill.preempt("p")
    for block in FROM[:12]:  # they are another request's now
        prefill.memories[0].fill(block, 300)
    other = shuffled(3, 20)
    prefill.compute("p", other, 0, 6)
    prefill.compute("p", other, 6)
    whole(decode)


def test_prefill_that_is_restarted_on_its_port(cleanup, pair):
    prefill, decode = pair
    decode.pull("d", "t", prefill, TO)
    time.sleep(0.2)
    prefill.close()
    assert not decode.wait_for("d", 2)
    again = Instance(cleanup, "prefill", port=prefill.port)
    known(again)
    decode.pull("e", "u", again, TO, engine=prefill.engine)
    assert not decode.wait_for("e", 2)
    decode.pull("f", "v", again, TO)
    again.hand("p", "v", FROM)
    whole(decode, "f")


def test_decode_that_is_gone_holds_nothing(cleanup, pair):
    prefill, _ = pair
    other = Instance(cleanup, "decode")
    other.pull("d", "t", prefill, TO)
    prefill.begin("p", "t", 20 * BLOCK)
    prefill.compute("p", FROM, 0, 9)
    time.sleep(0.2)
    other.close()
    prefill.compute("p", FROM, 9)
    prefill.finish("p")
    wait_until(lambda: prefill.has_let_go("p"), 6, "prefill's blocks")


def test_prefill_that_ends_while_decode_is_connected_logs_no_error(pair, caplog):
    prefill, decode = pair
    decode.pull("d", "t", prefill, TO)
    prefill.hand("p", "t", FROM)
    assert decode.wait_for("d")
    prefill.close()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_broken_connection_loses_nothing(pair):
    """Also not the word that all is there."""
    prefill, decode = pair

    def cut() -> None:
        (link,) = decode.workers[0].pulling._links.values()
        wait_until(lambda: link._writer is not None, what="the connection")
        decode.workers[0]._loop.soon(link._writer.transport.abort)

    decode.pull("d", "t", prefill, TO)
    time.sleep(0.1)
    cut()
    prefill.begin("p", "t", 20 * BLOCK)
    prefill.compute("p", FROM, 0, 9)
    cut()
    prefill.compute("p", FROM, 9)
    prefill.finish("p")
    whole(decode)
    wait_until(lambda: prefill.has_let_go("p"), 2, "prefill's blocks")


def test_blocks_of_another_size_are_refused(cleanup, pair, caplog):
    prefill, _ = pair
    other = Instance(cleanup, "decode", blocks=128, block_size=BLOCK, heads=16)
    other.pull("d", "t", prefill, TO)
    assert not other.wait_for("d", 2)
    assert "(protocol, tokens of a block, KV heads) of prefill are" in caplog.text


def test_many_at_once(pair):
    prefill, decode = pair
    for number in range(30):
        decode.pull(f"d{number}", f"t{number}", prefill, [2 * number, 2 * number + 1])
    for number in range(30):
        prefill.hand(f"p{number}", f"t{number}", [2 * number + 1, 2 * number])
    for number in range(30):
        assert decode.wait_for(f"d{number}")
        wait_until(lambda: prefill.has_let_go(f"p{number}"), 2, "prefill's blocks")  # noqa: B023
