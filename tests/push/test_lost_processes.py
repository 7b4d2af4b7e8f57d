"""Prefill or decode is killed, or stopped and resumed: the other side goes on, and its memory is its own."""

import signal
import time

import pytest

from mooncake.vllm.push.wire import LEASE, SILENCE
from tests.processes import wait_until
from tests.push.instance_process import RemoteInstance
from tests.push.instances import Instance, shuffled
from tests.push.memory import BLOCK

pytestmark = pytest.mark.slow

FROM, TO = shuffled(1, 20), shuffled(2, 20)


@pytest.fixture
def prefill(cleanup):
    made = RemoteInstance("prefill")
    cleanup.callback(made.stop)
    return made


@pytest.fixture
def decode(cleanup):
    return Instance(cleanup, "decode", limit=60)


def remote_decode(prefill: RemoteInstance, cleanup) -> RemoteInstance:
    """A decode instance in a process of its own that has asked for transfer "t"."""
    made = RemoteInstance("decode", limit=60)
    cleanup.callback(made.stop)
    made.pull("d", "t", prefill, TO)
    time.sleep(0.5)
    return made


def mark(decode: Instance) -> None:
    """The blocks are somebody else's now."""
    for block in TO:
        decode.memories[0].fill(block, 500)


def check_marks(decode: Instance) -> None:
    for block in TO:
        decode.memories[0].check(block, 500)


@pytest.mark.parametrize("force_tcp", ["0", "1"], ids=["cma", "tcp"])
def test_prefill_is_killed(cleanup, monkeypatch, request, force_tcp):
    monkeypatch.setenv("MC_FORCE_TCP", force_tcp)
    prefill, decode = request.getfixturevalue("prefill"), request.getfixturevalue("decode")
    decode.pull("d", "t", prefill, TO)
    prefill.do("begin", "p", "t", 20 * BLOCK)
    prefill.do("compute", "p", FROM, 0, 9)
    wait_until(lambda: (decode.memories[0].views[-1][TO[8]] != -1).all(), what="what was computed")
    time.sleep(0.1)
    prefill.process.kill()
    assert not decode.wait_for("d", 3)
    assert decode.failed["d"] == 9  # the rest is computed
    decode.check(TO[:9])
    decode.pull("e", "u", prefill, TO)
    assert not decode.wait_for("e", 6)


def test_prefill_that_was_stopped_writes_nothing_afterwards(prefill, decode):
    decode.pull("d", "t", prefill, TO)
    prefill.do("begin", "p", "t", 20 * BLOCK)
    prefill.do("compute", "p", FROM, 0, 9)
    prefill.process.send_signal(signal.SIGSTOP)
    prefill.tell("compute", "p", FROM, 9)
    prefill.tell("finish", "p")
    began = time.monotonic()
    assert not decode.wait_for("d", 2 * (SILENCE + LEASE) + 5)
    assert time.monotonic() - began > SILENCE - 2
    mark(decode)
    prefill.process.send_signal(signal.SIGCONT)
    prefill.hear()
    prefill.hear()
    wait_until(lambda: prefill.do("has_let_go", "p"), 10, "prefill's blocks")
    check_marks(decode)
    decode.pull("f", "v", prefill, TO)  # it is as good as before
    prefill.do("hand", "q", "v", FROM)
    assert decode.wait_for("f")
    decode.check(TO)


def test_a_short_stop_loses_nothing(prefill, decode):
    decode.pull("d", "t", prefill, TO)
    prefill.do("begin", "p", "t", 20 * BLOCK)
    prefill.do("compute", "p", FROM, 0, 9)
    prefill.process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    prefill.process.send_signal(signal.SIGCONT)
    prefill.do("compute", "p", FROM, 9)
    assert decode.wait_for("d")
    decode.check(TO)


def test_decode_that_is_stopped_holds_up_prefill_for_a_while_only(prefill, cleanup):
    """Decode is a process here too: of its connection only the socket lives on."""
    remote = remote_decode(prefill, cleanup)
    prefill.do("begin", "p", "t", 20 * BLOCK)
    prefill.do("compute", "p", FROM, 0, 9)
    remote.process.send_signal(signal.SIGSTOP)
    time.sleep(LEASE + 0.5)
    prefill.do("compute", "p", FROM, 9)
    prefill.do("finish", "p")
    wait_until(lambda: prefill.do("has_let_go", "p"), 3 * LEASE + 5, "prefill's blocks")


def test_decode_is_killed(prefill, cleanup):
    remote = remote_decode(prefill, cleanup)
    prefill.do("begin", "p", "t", 20 * BLOCK)
    prefill.do("compute", "p", FROM, 0, 9)
    remote.kill()
    prefill.do("compute", "p", FROM, 9)
    prefill.do("finish", "p")
    wait_until(lambda: prefill.do("has_let_go", "p"), 8, "prefill's blocks")
