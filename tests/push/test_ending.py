"""The server of prefill ends in the middle of whatever its connections do, and asyncio has nothing to complain of."""

import asyncio
import logging
import socket
from types import SimpleNamespace

from mooncake.rpc.place import parse_address
from mooncake.vllm.push.loop import LoopThread
from mooncake.vllm.push.routes import Ranks
from mooncake.vllm.push.serving import SCHEME, Server


def test_open_connections_end_without_a_word(caplog, capfd):
    caplog.set_level(logging.WARNING)
    loop = LoopThread("push")
    server = Server(loop, SimpleNamespace(sweep=lambda: None), "e", Ranks(0, 1, 0, 1), [], 1, 16)
    loop.start(server.start("127.0.0.1")).result(5)
    streams = [socket.create_connection(parse_address(server.address.removeprefix(SCHEME))) for _ in range(3)]
    streams[0].sendall(b"\x00")
    loop.start(asyncio.sleep(0.1)).result(5)
    loop.close()
    for stream in streams:
        stream.close()
    assert [record.getMessage() for record in caplog.records] == []
    assert "Exception in callback" not in capfd.readouterr().err
