"""RpcInterface between processes: what is sent arrives, and whatever happens to the other side ends in a code."""

import asyncio
import contextlib
import gc
import socket
import threading

import numpy as np
import pytest

from mooncake.engine import RpcInterface, create_rpc_client, create_rpc_server
from tests.engine.conftest import timed
from tests.processes import Worker, free_port, stop, wait_until

SERVER = """
import hashlib
from mooncake.engine import create_rpc_server
server, got = create_rpc_server(), []
assert server.initialize_server(address, 4, 2)
def take(received):
    got.append([received.data_size, hashlib.sha256(received.get_bytes()).hexdigest()[:8], received.source_address])
def take_tensor(received):
    got.append([received.shape, received.dtype, received.total_bytes, list(received.get_data_as_bytes()[:4])])
server.set_data_receive_callback(take)
server.set_tensor_receive_callback(take_tensor)
result = server.start_server_async()
"""


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def peer(cleanup, address):
    worker = Worker()
    cleanup.callback(worker.close)
    assert worker(SERVER, address=address) is True
    return worker


@pytest.fixture
def client():
    made = RpcInterface()
    assert made.initialize_client(pool_size=4, timeout_seconds=2)
    return made


def test_data_and_tensors(peer, client, address):
    for data in (b"hello", bytearray(b"x" * (20 << 20)), memoryview(b""), "text", np.arange(3, dtype=np.int32)):
        assert client.send_data(address, data) == 0
    assert client.send_tensor(address, np.arange(6, dtype=np.float32).reshape(2, 3)) == 0
    assert client.send_tensor(address, np.arange(8, dtype=np.uint8).reshape(2, 4)[:, ::2]) == 0
    assert client.send_tensor(address, np.float64(1.5)) == 0
    assert client.send_tensor(address, np.empty((0, 3), np.int64)) == 0
    got = peer("result = got")
    assert [size for size, _, _ in got[:5]] == [5, 20 << 20, 0, 4, 12]
    assert all(source.startswith("127.0.0.1:") for _, _, source in got[:5])
    assert got[5] == [[2, 3], "float32", 24, [0, 0, 0, 0]]
    assert got[6] == [[2, 2], "uint8", 4, [0, 2, 4, 6]]
    assert got[7][:3] == [[], "float64", 8]
    assert got[8][:3] == [[0, 3], "int64", 0]
    with pytest.raises(TypeError, match="send_data takes bytes"):
        client.send_data(address, 5)
    with pytest.raises(TypeError, match="send_tensor takes"):
        client.send_tensor(address, [1, 2])


def test_one_connection_is_used_again(peer, client, address):
    for _ in range(20):
        assert client.send_data(address, b"x") == 0
    assert len({source for _, _, source in peer("result = got")}) == 1


def test_from_coroutines(peer, address):
    sender = create_rpc_client()

    async def send():
        loop = asyncio.get_running_loop()
        first = [sender.send_data_async(address, b"%d" % i, loop) for i in range(20)]
        return await asyncio.gather(*first, sender.send_tensor_async(address, np.zeros(3), loop))

    assert asyncio.run(send()) == [0] * 21
    assert peer("result = len(got)") == 21


def test_what_fails(peer, client, address, cleanup):
    assert client.send_data(f"127.0.0.1:{free_port()}", b"x") == -1
    assert client.send_data("nonsense", b"x") == -1
    assert RpcInterface().send_data(address, b"x") == -1
    assert not RpcInterface().start_server_async()
    assert not RpcInterface().initialize_client(pool_size=0)
    for wrong in ("", "127.0.0.1", "127.0.0.1:many", "127.0.0.1:70000"):
        assert not RpcInterface().initialize_server(wrong)
    other = RpcInterface()
    assert other.initialize_server(address)
    assert not other.start_server_async()  # the port is taken
    peer("def fail(received): raise KeyError('bad')\nserver.set_data_receive_callback(fail)")
    assert client.send_data(address, b"x") == -1
    assert client.send_tensor(address, np.zeros(1)) == 0
    stop(peer.pid)
    code, took = timed(client.send_data, address, b"x")
    assert code == -1
    assert took < 5
    peer.kill()
    assert client.send_data(address, b"x") == -1


def test_a_server_that_comes_back(peer, client, address, cleanup):
    assert client.send_data(address, b"x") == 0
    peer.kill()
    assert client.send_data(address, b"x") == -1
    again = Worker()
    cleanup.callback(again.close)
    assert again(SERVER, address=address) is True
    assert client.send_data(address, b"x") == 0
    again("server.stop_server()")
    assert client.send_data(address, b"x") == -1
    assert again("result = server.start_server_async()") is True
    assert client.send_data(address, b"x") == 0


def test_garbage_on_the_port(peer, client, address):
    host, port = address.split(":")
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 8,
        b"PRCM\x05\x00\x00\x00hello",
        b"PRCM\x03\x00\x00\x00\x93\xcf\xff",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as stream:
            stream.sendall(data)
            stream.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert stream.recv(10) == b""
    assert client.send_data(address, b"x") == 0


def test_serving_in_the_foreground(address, client):
    server = create_rpc_server()
    got = []
    assert server.initialize(address, 2, 5, 10)
    server.set_data_receive_callback(lambda received: got.append(bytes(received.get_memory_view())))
    codes = []
    thread = threading.Thread(target=lambda: codes.append(server.start_server()))
    thread.start()
    wait_until(lambda: client.send_data(address, b"x") == 0)
    assert thread.is_alive()
    assert server.send_data(address, b"y") == 0  # to itself
    server.stop_server()
    thread.join(5)
    assert codes == [True]
    assert got == [b"x", b"y"]
    wait_until(lambda: not threads(), 3, "the end of the threads")


def test_one_that_is_dropped(address, client):
    server = create_rpc_server()
    assert server.initialize_server(address)
    assert server.start_server_async()
    assert client.send_data(address, b"x") == -1  # there is no callback
    del server
    gc.collect()
    wait_until(lambda: not threads(), 3, "the end of the threads")


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in ("mooncake-rpc", "mooncake-rpc-accept")]
