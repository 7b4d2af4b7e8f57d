"""Prefill and decode that speak TLS: registry, conversation and bytes."""

import contextlib
import http.client
import socket
import time
from types import SimpleNamespace

import pytest

from mooncake.security.anteroom import LIMIT
from mooncake.security.tls import contexts
from mooncake.vllm.push import serving
from mooncake.vllm.push.loop import LoopThread
from mooncake.vllm.push.routes import Ranks
from mooncake.vllm.push.wire import Knock, pack
from tests.processes import wait_until
from tests.push.instances import Instance, shuffled
from tests.security.authority import Authority

FROM, TO = shuffled(1, 20), shuffled(2, 20)


@pytest.fixture
def encrypted(tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    for name, path in authority.variables(*authority.issue()).items():
        monkeypatch.setenv(name, path)


def registry_knows(instance: Instance) -> bool:
    connection = http.client.HTTPSConnection("127.0.0.1", instance.port, timeout=5, context=contexts().client)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/query")
        return instance.engine.encode() in connection.getresponse().read()
    return False


@pytest.mark.parametrize("secret", ["", "a-secret-of-the-cluster"], ids=["open", "secret"])
@pytest.mark.parametrize("force_tcp", ["0", "1"], ids=["cma", "tcp"])
def test_both_speak_it(encrypted, cleanup, monkeypatch, secret, force_tcp):
    monkeypatch.setenv("MC_FORCE_TCP", force_tcp)
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", secret)
    prefill, decode = Instance(cleanup, "prefill"), Instance(cleanup, "decode")
    wait_until(lambda: registry_knows(prefill), 10, "the registry")
    decode.pull("d", "t", prefill, TO)
    prefill.hand("p", "t", FROM)
    assert decode.wait_for("d")
    decode.check(TO)
    wait_until(lambda: prefill.has_let_go("p"), 5, "prefill's blocks")


def test_who_does_not_is_told_so_and_let_go(encrypted, cleanup):
    loop = LoopThread("test")
    cleanup.callback(loop.close)
    server = serving.Server(loop, SimpleNamespace(sweep=lambda: None), "e", Ranks(0, 1, 0, 1), None, 1, 1)
    loop.start(server.start("127.0.0.1")).result(10)
    address = ("127.0.0.1", int(server.address.rpartition(":")[2]))
    with socket.create_connection(address, 10) as plain:
        plain.sendall(pack(Knock(b"n" * 32)))
        assert b"this port speaks TLS" in plain.makefile("rb").read()
    began = time.monotonic()
    with socket.create_connection(address, 3 * LIMIT) as silent:
        assert silent.recv(1) == b""
    assert time.monotonic() - began < 2 * LIMIT
