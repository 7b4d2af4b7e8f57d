"""The checker finds what it is there to find."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.invariants.baseline import Baseline, settle
from tests.invariants.cast import Cast
from tests.invariants.history import Call, Notes, judge, read
from tests.invariants.values import SMALLEST, value, version_of
from tests.processes import Worker, wait_until

KEY = "key"

# ---------------------------------------------------------------- values


@pytest.mark.parametrize("size", [SMALLEST, SMALLEST + 1, 1000, 4096, 100_003])
def test_a_value_is_known_again(size):
    made = value(KEY, 5, size)
    assert len(made) == size
    assert version_of(KEY, made) == (5, "")


def test_any_foreign_byte_is_noticed():
    made = value(KEY, 5, 2000)
    for at in range(0, 2000, 7):
        broken = bytearray(made)
        broken[at] ^= 1 + at % 255
        assert version_of(KEY, bytes(broken))[0] == -1


def test_parts_of_other_values_are_noticed():
    """Of another version, of another key, of another place of the same value; and what is too short or empty."""
    made = value(KEY, 5, 4096)
    for other in (value(KEY, 6, 4096), value("key2", 5, 4096), made[8:] + made[:8], bytes(4096)):
        for at in (24, 1024, 4088):  # after what tells key, version and size
            assert version_of(KEY, made[:at] + other[at : at + 8] + made[at + 8 :])[0] == -1
    assert version_of("key2", made)[1] == "the value of another key, or none"
    for short in (b"", made[:10], made[:-1], made + b"x"):
        assert version_of(KEY, short)[0] == -1


# ---------------------------------------------------------------- histories


def put(start: float, end: float, version: int, code: int = 0, *, replaces: bool = True) -> Call:
    return Call("upsert", "w", start, end, wrote={KEY: version}, replaces=replaces, codes={KEY: code})


def get(start: float, version: int) -> Call:
    return Call("get", "r", start, start + 0.1, saw={KEY: version}, codes={KEY: 0})


def removal(start: float, code: int = 0) -> Call:
    return Call("remove", "w", start, start + 0.1, removed=[KEY], codes={KEY: code})


UNKNOWN = put(1, float("inf"), 1)
UNKNOWN.codes = {}


@pytest.mark.parametrize(
    ("calls", "wrong"),
    [
        ([put(1, 2, 1), get(3, 1)], ""),
        ([put(1, 2, 1), get(1.5, 1)], ""),
        ([get(3, 1)], "nobody had put"),
        ([get(1, 1), put(3, 4, 1)], "nobody had put"),
        ([put(1, 2, 1), put(3, 4, 2), get(5, 1)], "version 2 had taken its place"),
        ([put(1, 2, 1), put(3, 4, 2), get(5, 2)], ""),
        ([put(1, 2, 1), put(3, 4, 2), get(3.5, 1)], ""),
        ([put(1, 2, 1), put(1.5, 4, 2), get(5, 1)], ""),  # beside each other: either may be the last
        ([put(1, 2, 1), put(3, 4, 2, -900), get(5, 1)], ""),
        ([put(1, 2, 1), put(3, 4, 2, replaces=False), get(5, 1)], ""),  # a put keeps what is there
        ([put(1, 2, 1, -900), put(3, 4, 2), get(5, 1)], ""),  # nobody was told when it came
        ([UNKNOWN, put(3, 4, 2), get(5, 1)], ""),
        ([put(1, 2, 1), removal(3), get(5, 1)], "it had been removed"),
        ([put(1, 2, 1), removal(3, -706), get(5, 1)], ""),
    ],
)
def test_what_a_get_may_return(calls, wrong):
    found = judge(calls).wrong
    assert bool(found) == bool(wrong), found
    assert all(wrong in text for text in found)


def test_a_removal_that_may_be_forgotten():
    calls = [put(1, 2, 1), removal(3), get(5, 1)]
    assert judge(calls, [(2.5, 4)]).wrong == []
    assert judge(calls, [(3.5, 4)]).wrong != []


def test_notes_of_a_process_that_was_killed(tmp_path):
    notes = Notes(tmp_path / "w1.notes")
    with notes.call("upsert", wrote={KEY: 7}, replaces=True) as result:
        result["codes"] = {KEY: 0}
    call = notes.call("upsert", wrote={KEY: 8}, replaces=True)
    call.__enter__()
    with open(tmp_path / "w1.notes", "ab") as f:
        f.write(b"[3, 12.5, {")
    done, begun = read([tmp_path / "w1.notes"])
    assert (done.process, done.wrote, done.codes) == ("w1", {KEY: 7}, {KEY: 0})
    assert done.start <= done.end < begun.start
    assert (begun.wrote, begun.end, begun.codes) == ({KEY: 8}, float("inf"), {})
    with_bytes = Call("get", "r", 1, 2, wrong=["k: other bytes"])
    assert judge([with_bytes]).wrong == ["r: get: k: other bytes"]


# ---------------------------------------------------------------- limits of time

WATCHED = """
import sys, time
from tests.invariants.watch import Watch
watch = Watch(sys.argv[1], longest_stop=float(sys.argv[2]))
def a_call_that_hangs():
    time.sleep(float(sys.argv[3]))
print("begins", flush=True)
with watch.call("call", 0.2):
    a_call_that_hangs()
print(watch.late, flush=True)
"""


def watched(stacks: Path, longest_stop: float, seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-c", WATCHED, str(stacks), str(longest_stop), str(seconds)]
    made = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert made.stdout.readline() == "begins\n"
    return made


def test_a_call_that_hangs_shows_where(tmp_path):
    with watched(tmp_path / "stacks", 0, 60) as process:
        assert process.wait(5) == 1
    assert "a_call_that_hangs" in (tmp_path / "stacks").read_text()


def test_a_call_that_is_late_is_told_of(tmp_path):
    with watched(tmp_path / "stacks", 5, 0.5) as process:
        assert "call took 0.5" in process.communicate()[0]


def test_the_time_of_a_stop_is_not_the_calls(tmp_path):
    with watched(tmp_path / "stacks", 5, 0.1) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGCONT)
        assert process.communicate()[0] == "[]\n"


# ---------------------------------------------------------------- what is held

LEAKS = {  # how a process takes it, and gives it back
    "descriptors": ("leak = [os.open('/dev/null', os.O_RDONLY) for _ in range(20)]", "for fd in leak: os.close(fd)"),
    "sockets": ("leak = [socket.socket() for _ in range(20)]", "for sock in leak: sock.close()"),
    "threads": (
        """
stop = threading.Event()
leak = [threading.Thread(target=stop.wait, daemon=True) for _ in range(20)]
for thread in leak: thread.start()""",
        "stop.set()",
    ),
    "mappings": (
        """
fd = os.memfd_create('mooncake-test')
os.truncate(fd, 4096)
leak = mmap.mmap(fd, 4096)""",
        "leak.close()",
    ),
    "deleted_mappings": (
        """
with tempfile.TemporaryFile() as f:
    f.truncate(4096)
    leak = mmap.mmap(f.fileno(), 4096)""",
        "leak.close()",
    ),
}


@pytest.mark.parametrize("what", LEAKS)
def test_what_a_process_holds_too_much(what, cleanup):
    worker = Worker()
    cleanup.callback(worker.close)
    take, give_back = LEAKS[what]
    worker("import mmap, os, socket, tempfile, threading")
    processes = {"worker": worker.pid}
    baseline = Baseline(processes)
    assert baseline.excess(processes) == []
    worker(take)
    assert any(f" {what}," in text and text.startswith("worker has ") for text in baseline.excess(processes))
    worker(give_back)
    assert settle(lambda: baseline.excess(processes), 3) == []


def test_settling_waits_no_longer_than_its_limit():
    counts = itertools.count(3, -1)
    assert settle(lambda: ["too much"] * max(0, next(counts)), 5) == []
    assert settle(lambda: ["too much"], 0.2) == ["too much"]


def test_shared_memory_that_was_left():
    baseline = Baseline({})
    path = Path("/dev/shm") / f"mooncake-test-{os.getpid()}"
    path.touch()
    try:
        assert baseline.excess({}) == [f"{path} was left"]
    finally:
        path.unlink()


# ---------------------------------------------------------------- who dies


def test_who_died_without_being_killed(cleanup):
    cast = Cast()
    with cast.started():
        workers = [Worker() for _ in range(3)]
    for i, worker in enumerate(workers):
        cleanup.callback(worker.close)
        worker("pass")
        cast.add(f"worker {i}", worker.pid)
    cast.kill(workers[0].pid)
    workers[0].process.wait()
    assert cast.dead() == []
    workers[1].kill()
    assert cast.dead() == [f"worker 1 ({workers[1].pid})"]
    assert set(cast.left()) == {workers[2].pid}


def test_processes_that_others_started_are_found_too(cleanup):
    cast = Cast()
    with cast.started():
        worker = Worker()
    cleanup.callback(worker.close)
    grandchild = worker("import subprocess\nresult = subprocess.Popen(['sleep', '60'], start_new_session=True).pid")
    cast.leaves(worker.pid)
    worker.kill()
    assert list(cast.left()) == [grandchild]
    os.kill(grandchild, signal.SIGKILL)
    wait_until(lambda: not cast.left(), what="the end of it")
