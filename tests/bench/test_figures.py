"""What the numbers mean: summaries, lengths, arrivals, steps, machines."""

import json
import math
import random

import numpy as np
import pytest
from openpyxl import load_workbook

from mooncake.bench.figures import StepFigures, measured
from mooncake.bench.load import Answered
from mooncake.bench.machine import Machine, Need, weights_size
from mooncake.bench.report import write_report
from mooncake.bench.steps import Step, parse_steps
from mooncake.bench.summary import Summary
from mooncake.bench.values import Values
from mooncake.bench.workload import Lengths, Workload

GIB = 1 << 30


@pytest.mark.parametrize("count", [1, 2, 3, 100, 1001])
def test_summary_is_numpys(count):
    values = [random.Random(count).expovariate(1) for _ in range(count)]
    found = Summary.of(values)
    assert (found.count, found.largest) == (count, max(values))
    assert found.mean == pytest.approx(np.mean(values))
    shares = [found.p50, found.p90, found.p95, found.p99]
    assert shares == pytest.approx(list(np.quantile(values, [0.5, 0.9, 0.95, 0.99])))
    assert found.scaled(1000).p90 == pytest.approx(1000 * found.p90)


def test_nothing_was_measured():
    found = Summary.of([])
    assert found.count == 0
    assert math.isnan(found.p50)


def work(**more) -> Workload:
    settings = {"requests": 400, "rate": 8.0, "input_len": Lengths(10, 20), "output_len": Lengths(5, 5)}
    return Workload(**{**settings, "shared_prefix": 4, "vocabulary": 1024, "seed": 3, **more})


def test_a_workload_is_drawn_from_its_seed():
    planned = work().draw()
    assert planned == work().draw()
    assert planned != work(seed=4).draw()
    assert len(planned) == 400
    assert {len(one.prompt) for one in planned} == set(range(10, 21))
    assert {one.output_len for one in planned} == {5}
    assert len({tuple(one.prompt[:4]) for one in planned}) == 1
    assert len({tuple(one.prompt[4:10]) for one in planned}) == 400
    assert all(256 <= token < 1024 for one in planned for token in one.prompt)


def test_arrivals_are_those_of_a_poisson_process():
    times = [one.at for one in work(requests=4000).draw()]
    gaps = np.diff(times)
    assert times[0] == 0
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.08)
    assert np.std(gaps) == pytest.approx(1 / 8, rel=0.12), "of an exponential distribution"
    assert {one.at for one in work(rate=math.inf).draw()} == {0.0}


def test_warm_up_prompts_are_others():
    assert {tuple(one.prompt) for one in work().warm_up(3)}.isdisjoint({tuple(one.prompt) for one in work().draw()})


@pytest.mark.parametrize("text", ["", "0", "5:4", "a", "1:2:3", "-1"])
def test_lengths_that_are_none(text):
    with pytest.raises(ValueError, match="expected tokens as"):
        Lengths.parse(text)


def test_steps():
    assert parse_steps("1P1D, 2p4d,1P1D,0P2D") == [Step(1, 1), Step(2, 4), Step(0, 2)]
    for wrong in ("", "1P", "1P0D", "1P1D,", "xPyD"):
        with pytest.raises(ValueError, match="expected steps such as 1P1D"):
            parse_steps(wrong)


@pytest.mark.parametrize(
    ("machine", "need", "reason"),
    [
        (Machine(("0", "1"), 2, GIB), Need(1, 0), ""),
        (Machine(("0", "1"), 2, GIB), Need(2, 0), "1P1D needs 4 GPUs, 2 an instance, but this machine has 2."),
        (Machine((), 1, 9 * GIB), Need(0, GIB), ""),
        (
            Machine((), 2, 3 * GIB),
            Need(0, 2 * GIB),
            "1P1D needs 4.0 GiB of memory, about 2.0 an instance, but this machine has 3.0 left.",
        ),
    ],
)
def test_what_a_machine_is_too_small_for(machine, need, reason):
    assert machine.lacks(Step(1, 1), need) == reason


def test_cores_that_are_too_few():
    assert "has 5 instances on CPUs, but this machine has 2 cores" in Machine((), 2, 99 * GIB).lacks(
        Step(2, 3), Need(0, GIB)
    )


def test_weights_of_a_folder(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"1234")
    (tmp_path / "config.json").write_text("{}")
    assert weights_size(str(tmp_path)) == 4
    assert weights_size("meta-llama/Llama-3.1-8B") == 0


def answers(count: int) -> list[Answered]:
    return [
        Answered(due=i * 0.1, sent=0.001, input_tokens=10, output_tokens=5, ttft=0.1, e2el=0.5, gaps=[0.1] * 4)
        for i in range(count)
    ]


def test_figures_of_a_step():
    bad = Answered(due=0.0, sent=0.0, input_tokens=10, error="status 500: no")
    step = measured("1P1D", [*answers(10), bad, bad])
    assert (len(step.good), step.errors, step.passed) == (10, 2, False)
    assert step.seconds == pytest.approx(0.9 + 0.5)
    assert step.output_rate == pytest.approx(50 / 1.4)
    assert step.times("tpot").mean == pytest.approx(100)
    assert step.times("itl").count == 40
    assert step.common_errors() == [("status 500: no", 2)]
    assert "2 x status 500: no" in step.text()


def test_the_report_has_a_sheet_for_every_step(tmp_path):
    steps = [
        measured("1P1D", answers(12)),
        StepFigures("4P4D", failure="4P4D needs 8 GPUs.", skipped=True),
        StepFigures("2P1D", failure="vLLM (prefill 0) ended with exit code 1"),
    ]
    files = write_report(tmp_path / "out", {"model": "tiny"}, steps)
    assert sorted(file.name for file in files) == [
        "latency.png",
        "results.json",
        "results.xlsx",
        "throughput.png",
        "ttft.png",
    ]
    for file in files:
        assert file.suffix != ".png" or file.read_bytes().startswith(b"\x89PNG")
    book = load_workbook(tmp_path / "out" / "results.xlsx")
    assert book.sheetnames == ["summary", "1P1D", "4P4D", "2P1D"]
    summary = [row for row in book["summary"].iter_rows(values_only=True) if row[0]]
    head, first, second, _ = summary[:4]
    row = dict(zip(head, first, strict=True))
    assert (row["answers"], row["errors"], row["ttft p99 (ms)"], row["itl mean (ms)"]) == (12, 0, 100, 100)
    assert dict(zip(head, second, strict=True))["note"] == "4P4D needs 8 GPUs."
    rows = list(book["1P1D"].iter_rows(values_only=True))
    assert len([row for row in rows if isinstance(row[0], int | float)]) == 12, "one row a request"
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [step["skipped"] for step in told["steps"]] == [False, True, False]
    assert told["steps"][0]["milliseconds"]["e2el"]["p90"] == 500


@pytest.mark.parametrize("length", [1, 7, 8, 64, 65, 4096, 100_003])
def test_any_wrong_byte_of_a_value_shows(length):
    values = Values(length, seed=5)
    room = np.zeros(length, np.uint8)
    values.fill(room, 17)
    assert values.fault(room, 17) == ""
    for place in {0, length // 2, length - 1}:
        room[place] ^= 1
        assert f"the first at offset {place}" in values.fault(room, 17)
        room[place] ^= 1
    if length >= 64:
        assert f"it says that it is value 17 of {length} bytes with seed 5" in values.fault(room, 18)
        assert Values(length, seed=6).fault(room, 17)
        assert values.fault(np.roll(room, 8), 17)
