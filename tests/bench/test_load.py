"""The load generator against a real server: what it sends, when, and what it makes of the answers."""

import asyncio
import json

import pytest

from mooncake.bench.load import Target, generate, models_of
from mooncake.bench.workload import Lengths, Planned
from tests.bench.test_figures import work


def nothing() -> None:
    pass


def run(engine, planned, timeout: float = 20, watch=nothing):
    return asyncio.run(generate(Target(engine.url, "stub", timeout), planned, watch))


def planned(count: int, tokens: int = 8, gap: float = 0.0) -> list[Planned]:
    return [Planned(number * gap, [300 + number, 301, 302], tokens) for number in range(count)]


def test_answers_are_measured(engine):
    engine.control(first_ms=80, gap_ms=20)
    for answer in run(engine, planned(4)):
        assert answer.error == ""
        assert (answer.input_tokens, answer.output_tokens, len(answer.gaps)) == (3, 8, 7)
        assert 0.08 <= answer.ttft < 1
        assert 0.02 <= sorted(answer.gaps)[3] < 0.2
        assert answer.e2el == pytest.approx(answer.ttft + sum(answer.gaps))
        assert answer.tpot == pytest.approx(sum(answer.gaps) / 7)
    for body in engine.bodies():
        assert (body["max_tokens"], body["stream"], body["temperature"], body["ignore_eos"]) == (8, True, 0, True)


def test_requests_are_sent_at_their_times_whatever_is_unanswered(engine):
    engine.control(first_ms=1500)
    found = run(engine, planned(10, gap=0.05))
    assert all(answer.sent < 0.5 for answer in found)
    assert max(answer.due + answer.sent for answer in found) < 1.5, "the last was sent before the first was answered"
    assert all(1.5 <= answer.ttft < 3 for answer in found)


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        ({"status": 503}, "status 503: the stub says no"),
        ({"drop_after": 3}, "the connection failed"),
        ({"error_after": 3}, "the stream ended with an error: engine core died"),
        ({"end_after": 3}, "the stream ended before its end was said"),
        ({"hang_after": 3}, "no whole answer within 1 s"),
        ({"split": 3}, ""),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(engine, faults, error):
    engine.control(**faults)
    (answer,) = run(engine, planned(1), timeout=1)
    assert answer.error.startswith(error)
    assert bool(answer.error) == bool(error)


def test_nobody_listens(engine):
    (answer,) = asyncio.run(generate(Target("http://127.0.0.1:1", "stub", 5), planned(1), nothing))
    assert answer.error.startswith("the connection failed")


def test_what_watches_ends_the_run(engine):
    engine.control(hang_after=0)

    def watch() -> None:
        raise RuntimeError("a child has died")

    with pytest.raises(RuntimeError, match="a child has died"):
        run(engine, planned(3), watch=watch)


def test_models(engine):
    assert asyncio.run(models_of(engine.url)) == ["stub"]


def test_serve_load_reports(bench, engine, tmp_path):
    arguments = (
        "--requests",
        20,
        "--rate",
        100,
        "--input-len",
        "8:16",
        "--output-len",
        4,
        "--output",
        tmp_path / "out",
    )
    code, out, err = bench("serve-load", "--url", engine.url, *arguments).end()
    assert (code, err) == (0, "")
    assert "load: 20 answers" in out
    assert "0 errors" in out
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert told["settings"]["model"] == "stub"
    assert told["steps"][0]["milliseconds"]["ttft"]["p50"] > 0
    expected = work(requests=20, input_len=Lengths(8, 16), shared_prefix=0, vocabulary=32_000, seed=0).draw()
    prompts = [body["prompt"] for body in engine.bodies()][-20:]
    assert sorted(prompts) == sorted(one.prompt for one in expected)


def test_serve_load_says_what_is_wrong(bench, engine):
    engine.control(status=500)
    code, _, err = bench("serve-load", "--url", engine.url, "--requests", 2).end()
    assert code == 1
    assert err == f"mooncake: {engine.url} answers no request: status 500: the stub says no\n"

    code, _, err = bench("serve-load", "--url", "http://127.0.0.1:1").end()
    assert code == 1
    assert err.startswith("mooncake: http://127.0.0.1:1 cannot be asked for its models (")

    code, _, err = bench("serve-load", "--url", engine.url, "--shared-prefix", 600).end()
    assert (code, err) == (
        1,
        "mooncake: --shared-prefix is 600 tokens, but prompts may have only 512 (--input-len).\n",
    )
