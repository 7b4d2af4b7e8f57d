"""Bodies of requests wait for room: together they never have more than there is."""

import asyncio
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from mooncake.rest.room import NoRoomError, Room
from mooncake.rest.server import ALL_BODIES, LARGEST_BODY
from tests.processes import wait_until

MIB = 1 << 20


def test_first_come_first_served():
    async def run() -> list[str]:
        room, seen, held = Room(10, 60), [], 0

        async def use(name: str, size: int) -> None:
            nonlocal held
            async with room.take(size):
                held += min(size, 10)
                assert held <= 10
                seen.append(name)
                await asyncio.sleep(0.01)
                held -= min(size, 10)

        await asyncio.gather(*(use(name, size) for name, size in (("a", 6), ("b", 6), ("c", 1), ("d", 99), ("e", 1))))
        async with room.take(10):
            pass
        return seen

    assert asyncio.run(run()) == ["a", "b", "c", "d", "e"]


def test_who_stops_waiting_leaves_nothing():
    async def run() -> None:
        room = Room(10, 0.05)
        async with room.take(10):
            with pytest.raises(NoRoomError, match="try again"):
                await room.take(1).__aenter__()
            waiting = asyncio.create_task(room.take(10).__aenter__())
            small = asyncio.create_task(room.take(1).__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.sleep(0)
        await small
        async with room.take(9):
            pass

    asyncio.run(run())


def resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def test_many_large_bodies_at_once(service):
    """Twenty of 90 MB, sent as fast as they are taken, and never to the end: the service holds four, and answers."""
    before = resident(service.process.pid)
    most = [0]
    stopped = threading.Event()
    crowd = [socket.create_connection(("127.0.0.1", service.port), 10) for _ in range(20)]
    head = b"PUT /api/put HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (90 * MIB)

    def send(sock: socket.socket) -> None:
        try:
            sock.sendall(head)
            for _ in range(80):
                sock.sendall(b"x" * MIB)
                most[0] = max(most[0], resident(service.process.pid))
        except OSError:
            assert stopped.is_set()

    threads = [threading.Thread(target=send, args=(sock,)) for sock in crowd]
    for thread in threads:
        thread.start()
    time.sleep(2)
    began = time.monotonic()
    assert service("GET", "/api/exist/k")[0] == 200
    assert time.monotonic() - began < 3
    stopped.set()
    for sock in crowd:
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    for thread in threads:
        thread.join()
    assert most[0] - before < ALL_BODIES + 2 * LARGEST_BODY
    body = json.dumps({"key": "k", "value": "v"}).encode()
    wait_until(lambda: service("PUT", "/api/put", raw=body)[0] == 200, 10, "there is room again")
