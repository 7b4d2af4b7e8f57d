"""`mooncake bench xpyd` with stub engines in place of vLLM: its steps, its files, and what it leaves behind."""

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from openpyxl import load_workbook

from tests.processes import free_port, gone, wait_until

STUB = shlex.join([sys.executable, str(Path(__file__).with_name("stub_vllm.py"))])
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def xpyd(bench, tmp_path):
    """With stub engines, which know nothing of MooncakeConnector's side channel."""

    def start(*more, engine: str = STUB, **options):
        return bench(
            "xpyd", "--model", "a/tiny", "--device", "cpu", "--connector", "store", "--instance-memory", "64MB",
            "--engine", engine, "--requests", 12, "--rate", 50, "--input-len", 16, "--output-len", 4,
            "--output", tmp_path / "out", *more, **options,
        )  # fmt: skip

    return start


def figures(tmp_path) -> list[dict]:
    return json.loads((tmp_path / "out" / "results.json").read_text())["steps"]


def engines_of(command) -> list[int]:
    return [pid for pid in command.below() if b"stub_vllm" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def assert_nothing_left(pids: list[int]) -> None:
    assert len(pids) > 2
    wait_until(lambda: all(map(gone, pids)), 5, "the end of everything that was started")


@pytest.mark.slow
def test_steps_one_after_the_other(xpyd, tmp_path):
    command = xpyd("--steps", "1P1D,64P64D,0P2D")
    command.read_until("1P1D: ready")
    pids = command.below()
    code, out, err = command.end()
    assert (code, err) == (0, "")
    assert_nothing_left(pids)
    assert "64P64D: skipped: 64P64D has 128 instances on CPUs" in out
    one, large, two = figures(tmp_path)
    assert [one["answers"], two["answers"]] == [12, 12]
    assert large["skipped"]
    book = load_workbook(tmp_path / "out" / "results.xlsx")
    assert book.sheetnames == ["summary", "1P1D", "64P64D", "0P2D"]
    logs = tmp_path / "out" / "logs"
    assert {file.name for file in (logs / "1P1D").iterdir()} == {
        "master.log", "prefill-0.log", "decode-0.log", "proxy.log", "commands.txt",
    }  # fmt: skip
    commands = (logs / "1P1D" / "commands.txt").read_text()
    assert '"kv_role":"kv_producer"' in commands
    assert '"kv_role":"kv_consumer"' in commands
    assert "--served-model-name tiny" in commands


@pytest.mark.slow
def test_every_instance_has_its_own_gpus(xpyd, tmp_path):
    command = xpyd(
        "--steps", "1P1D,1P2D", "--device", "auto", "--tensor-parallel-size", 2, "--rate", 4,
        CUDA_VISIBLE_DEVICES="0,3,5,6,7",
    )  # fmt: skip
    command.read_until("1P1D: ready")
    seen = {
        name.removeprefix("CUDA_VISIBLE_DEVICES=")
        for pid in engines_of(command)
        for name in Path(f"/proc/{pid}/environ").read_text().split("\0")
        if name.startswith("CUDA_VISIBLE_DEVICES=")
    }
    assert seen == {"0,3", "5,6"}
    code, out, _ = command.end()
    assert code == 0
    assert "1P2D: skipped: 1P2D needs 6 GPUs, 2 an instance, but this machine has 5." in out
    commands = (tmp_path / "out" / "logs" / "1P1D" / "commands.txt").read_text()
    assert commands.count("--tensor-parallel-size 2") == 2


@pytest.mark.slow
def test_a_child_that_dies_fails_its_step_alone(xpyd, tmp_path):
    command = xpyd("--steps", "1P1D,0P1D", "--rate", "4")
    command.read_until("1P1D: ready")
    pids = command.below()
    os.kill(engines_of(command)[0], signal.SIGKILL)
    code, out, err = command.end()
    assert (code, err) == (1, "")
    assert_nothing_left(pids)
    assert "1P1D: vLLM (prefill 0) was ended by SIGKILL" in out
    assert f"The logs are in {tmp_path / 'out' / 'logs' / '1P1D'}." in out
    assert [bool(step["failure"]) for step in figures(tmp_path)] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing_behind(xpyd, tmp_path, number):
    command = xpyd("--steps", "0P1D,1P1D", "--rate", "50")
    command.read_until("1P1D: starting")
    wait_until(lambda: len(engines_of(command)) == 2, what="two engines")
    pids = command.below()
    code, out, err = command.end(number)
    assert (code, err) == (128 + number, "")
    assert_nothing_left(pids)
    assert "Interrupted; everything that was started has been stopped." in out
    assert [step["step"] for step in figures(tmp_path)] == ["0P1D"], "what was measured is written"


@pytest.mark.slow
def test_its_children_die_with_it(xpyd):
    command = xpyd("--steps", "1P1D", "--rate", "1")
    command.read_until("1P1D: ready")
    pids = command.below()
    command.end(signal.SIGKILL)
    assert_nothing_left(pids)


@pytest.mark.slow
def test_an_engine_that_does_not_start(xpyd):
    code, out, err = xpyd("--steps", "1P1D", "--no-report", "--engine-args", "--exit-code 3").end()
    assert (code, err) == (1, "")
    assert "says: ValueError: this model is too large for me" in out
    assert "ended with exit code 3; the end of its log (" in out


@pytest.mark.slow
def test_variables_stand_for_flags(xpyd, tmp_path):
    ports = {name: free_port() for name in ("PREFILL_PORT_BASE", "DECODE_PORT_BASE", "MASTER_PORT")}
    told = {name: str(port) for name, port in ports.items()}
    code, _, err = xpyd(NUM_PREFILL="0", NUM_DECODE="1", **told).end()
    assert (code, err) == (0, "")
    assert [step["step"] for step in figures(tmp_path)] == ["0P1D"]
    logs = tmp_path / "out" / "logs" / "0P1D"
    assert f"--port {ports['DECODE_PORT_BASE']} " in (logs / "commands.txt").read_text()
    assert f"Master service started on port {ports['MASTER_PORT']}" in (logs / "master.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (("--steps", "1P"), {}, 'argument --steps: expected steps such as 1P1D,2P4D with at least one decode instance'),
        (("--steps", "1P1D", "--num-prefill", "1"), {}, "--steps and --num-prefill or --num-decode say the same"),
        ((), {"NUM_DECODE": "0"}, "NUM_DECODE is 0; expected at least one decode instance."),
        ((), {"NUM_PREFILL": "many"}, "environment variable NUM_PREFILL is 'many'; expected a whole number"),
        ((), {"MASTER_PORT": "99999"}, "The variable MASTER_PORT is 99999; expected a port from 1 to 65535."),
        (("--model", ""), {}, "--model, or the variable MODEL, must name the model"),
        (("--engine", "/no/such/program"), {}, '--engine: there is no program "/no/such/program" to run.'),
        (("--engine", ""), {}, "vLLM is not installed for "),
        (("--rate", "0"), {}, 'argument --rate: expected a number above 0, but found "0"'),
        (("--tensor-parallel-size", "2"), {}, "--tensor-parallel-size is for GPUs"),
    ],
)  # fmt: skip
def test_wrong_settings(xpyd, arguments, variables, message):
    code, out, err = xpyd(*arguments, **variables).end()
    assert code in (1, 2)
    assert message in err
    assert out == ""
    assert err.count("\n") == 1, "one sentence"


def test_a_port_that_is_taken(xpyd, engine):
    code, out, _ = xpyd("--steps", "0P1D", "--decode-port-base", engine.port, "--no-report").end()
    assert code == 1
    assert f"Another program listens on port {engine.port} of 127.0.0.1; choose another --decode-port-base." in out


def test_a_report_that_could_not_be_written(bench, tmp_path):
    hide = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'openpyxl' else f(n)"
    (tmp_path / "sitecustomize.py").write_text(hide)
    code, _, err = bench("xpyd", "--model", "m", "--engine", STUB, PYTHONPATH=str(tmp_path)).end()
    assert code == 1
    assert err == (
        "mooncake: The report needs openpyxl: install mooncake-py[bench], or give --no-report to see the figures on "
        "the terminal only.\n"
    )
