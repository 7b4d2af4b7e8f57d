"""Prefill and decode in a cluster with a secret: they find each other, or nothing comes, soon and without a hang."""

import contextlib
import socket
import time
from types import SimpleNamespace

import pytest

from mooncake.rpc.handshake import MOST_BYTES
from mooncake.security.anteroom import MOST
from mooncake.security.secret import new_nonce
from mooncake.vllm.push import serving
from mooncake.vllm.push.loop import LoopThread
from mooncake.vllm.push.routes import Ranks
from mooncake.vllm.push.wire import Knock, pack
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


@pytest.fixture
def door(cleanup, monkeypatch):
    """The port of a prefill worker that gives strangers more time than a test has."""
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", SECRET)
    monkeypatch.setattr(serving, "_GREET_LIMIT", 600.0)
    loop = LoopThread("test")
    cleanup.callback(loop.close)
    server = serving.Server(loop, SimpleNamespace(sweep=lambda: None), "e", Ranks(0, 1, 0, 1), None, 1, 1)
    loop.start(server.start("127.0.0.1")).result(10)
    return int(server.address.rpartition(":")[2])


def stranger(cleanup, port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), 10)
    cleanup.callback(made.close)
    return made


def test_a_strangers_message_is_small(cleanup, door):
    one = stranger(cleanup, door)
    one.sendall((MOST_BYTES + 1).to_bytes(4, "little"))
    said = one.makefile("rb").read()
    assert b"MOONCAKE_AUTH_TOKEN" in said, "why it is refused"


def test_too_many_strangers_push_out_each_other(cleanup, door):
    crowd = [stranger(cleanup, door) for _ in range(MOST + 50)]
    for one in crowd[:50]:
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""
    crowd[-1].sendall(pack(Knock(new_nonce())))
    assert len(crowd[-1].recv(4)) == 4, "who comes is heard all the same"
