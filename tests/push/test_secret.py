"""Prefill and decode in a cluster with a secret: they find each other, or nothing comes, soon and without a hang."""

import time

import pytest

from tests.processes import wait_until
from tests.push.instances import Instance, known, shuffled

FROM, TO = shuffled(1, 20), shuffled(2, 20)
SECRET, OTHER = "a-secret-of-the-cluster", "another-secret-than-that"


@pytest.mark.parametrize("force_tcp", [False, True], ids=["cma", "tcp"])
def test_both_know_it(cleanup, monkeypatch, force_tcp):
    monkeypatch.setenv("MC_FORCE_TCP", str(int(force_tcp)))
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", SECRET)
    prefill, decode = Instance(cleanup, "prefill"), Instance(cleanup, "decode")
    known(prefill)
    decode.pull("d", "t", prefill, TO)
    prefill.hand("p", "t", FROM)
    assert decode.wait_for("d")
    decode.check(TO)
    wait_until(lambda: prefill.has_let_go("p"), 2, "prefill's blocks")


@pytest.mark.parametrize(("of_prefill", "of_decode"), [(SECRET, OTHER), (SECRET, ""), ("", SECRET)])
def test_they_do_not_agree(cleanup, monkeypatch, of_prefill, of_decode):
    """Decode is told at once, and computes the prompt; nothing is written."""
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", of_prefill)
    prefill = Instance(cleanup, "prefill")
    known(prefill)
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", of_decode)
    decode = Instance(cleanup, "decode")
    began = time.monotonic()
    prefill.hand("p", "t", FROM)
    decode.pull("d", "t", prefill, TO)
    assert not decode.wait_for("d")
    assert time.monotonic() - began < 5
    assert not decode.touched([])
