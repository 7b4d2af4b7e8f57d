"""The porter and its anteroom: whatever visitors do, and whatever becomes of them, nothing is left and nobody waits."""

import contextlib
import gc
import os
import select
import socket
import threading
import urllib.error
import urllib.request

import pytest

from mooncake.engine import RpcInterface, TransferEngine
from mooncake.rpc import porter as porters
from mooncake.rpc.client import Connection
from mooncake.rpc.messages import PROTOCOL, Hello, Welcome
from mooncake.rpc.porter import Porter
from mooncake.security.anteroom import MOST, Anteroom
from mooncake.security.secret import Secret
from mooncake.transfer.endpoint import Endpoint
from mooncake.transfer.listening import listen_tcp
from mooncake.transfer.regions import Regions
from tests.processes import wait_until

SECRET = "a-secret-of-the-cluster"
HELLO = Hello(PROTOCOL, "test", "client", "1-1", "elsewhere")


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", SECRET)


def welcome() -> Welcome:
    return Welcome(PROTOCOL, "test", 0, 0)


def ended(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if not poll.poll(0):
        return False
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


def test_who_was_pushed_out_takes_nobody_along():
    """Each has a ticket of its own, also when the one before has gone."""
    room = Anteroom(most=1)
    closed: list[int] = []
    tickets = [room.enter(lambda i=i: closed.append(i)) for i in range(50)]
    assert closed == list(range(49))
    for ticket in tickets[:-1]:
        room.leave(ticket)
    room.enter(lambda: closed.append(50))
    assert closed == list(range(50)), "the one that waited was not counted any more"


def test_too_many_are_closed_at_once(monkeypatch):
    """Not when somebody comes round to look: a crowd would take all descriptors until then."""
    monkeypatch.setattr(porters, "_SWEEP", 3600.0)
    admitted: list[socket.socket] = []
    refused = threading.Semaphore(0)
    porter = Porter(Secret(SECRET), welcome, admitted.append, lambda: refused.release())
    pairs = [socket.socketpair() for _ in range(MOST + 100)]
    try:
        for _, theirs in pairs:
            porter.take(theirs)
        wait_until(lambda: all(ended(ours) for ours, _ in pairs[:100]), 10, "the first ones are sent away")
        assert not any(ended(ours) for ours, _ in pairs[100:])
        friend = Connection(pairs[-1][0])
        assert friend.greet(HELLO).version == "test"
        wait_until(lambda: len(admitted) == 1, 10)
    finally:
        porter.stop()
    wait_until(lambda: all(ended(ours) for ours, _ in pairs[:-1]), 10, "nobody is left")
    assert sum(refused.acquire(blocking=False) for _ in range(MOST + 200)) == MOST + 99
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_forked_child_lets_visitors_go():
    """Else they would not notice that the parent has closed their connection."""
    listener = listen_tcp("127.0.0.1", 23000, 23200)
    made = Endpoint(listener, Regions(), 1, 5.0)
    made.start()
    stranger = socket.create_connection(listener.getsockname(), 5)
    try:
        wait_until(lambda: made._porter is not None and len(made._porter._visitors) == 1, 10, "it stands at the door")
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.close(write)
                made.abandon()
                os.read(read, 1)  # until the parent ends
            os._exit(0)
        os.close(read)
        made.close()
        try:
            wait_until(lambda: ended(stranger), 10, "the stranger hears that it is over")
        finally:
            os.close(write)
            os.waitpid(child, 0)
    finally:
        made.close()
        stranger.close()


def test_without_a_thread_to_spare_others_are_served_later(monkeypatch):
    server, client = RpcInterface(), RpcInterface()
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert server.initialize_server(f"127.0.0.1:{port}", 2)
    server.set_data_receive_callback(lambda data: heard.append(data.get_bytes()))
    assert server.start_server_async()
    start = threading.Thread.start
    failed = threading.Event()

    def fail(thread: threading.Thread) -> None:
        if thread.name == "mooncake-rpc" and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    try:
        monkeypatch.setattr(threading.Thread, "start", fail)
        assert client.initialize_client(2)
        client.send_data(f"127.0.0.1:{port}", b"lost")
        assert failed.is_set()
        later = RpcInterface()
        assert later.initialize_client(2)
        assert later.send_data(f"127.0.0.1:{port}", b"hello") == 0
        assert heard[-1] == b"hello"
    finally:
        monkeypatch.undo()
        server.stop_server()


def test_a_header_that_is_no_text_is_refused_as_others_are(master):
    asked = urllib.request.Request(f"http://127.0.0.1:{master.metrics_port}/metrics")
    asked.add_header("Authorization", b"Bearer \xff\xfe\x80".decode("latin-1"))
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=30)
    assert refused.value.code == 401


def test_a_bad_secret_leaves_nothing_open(monkeypatch):
    monkeypatch.setenv("MOONCAKE_AUTH_TOKEN", "short")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = RpcInterface()
    assert server.initialize_server(f"127.0.0.1:{port}", 2)

    def fail() -> None:
        assert TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
        assert not server.start_server_async()

    fail()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        fail()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
