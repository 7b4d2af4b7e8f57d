"""What the proxy adds to a request, and how many it carries on one core.

    python -m benchmarks.proxy [--requests 3000] [--concurrency 64] [--rate 300] [--prefill]

A stub engine and a load generator run on one core, the proxy alone on another; every answer is a stream of 16 events
that the engine writes one by one, over connections that are kept alive.  Latency is measured at a fixed rate of
arrivals, directly and through the proxy in turns; the rate with as many requests at once as --concurrency says (then
events that wait together travel together).  With --prefill each request also has a prefill half (MooncakeConnector's
protocol, both halves sent at once).
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import uvloop
from tests.processes import BIN, free_port, wait_until

CHUNKS = 16
_PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


class _Engine(asyncio.Protocol):
    """HTTP just as far as the proxy needs it: keep-alive, bodies with a length, chunked answers."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s, self._data, self._loop = gap_s, b"", asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while b"\r\n\r\n" in self._data:
            head, _, rest = self._data.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
            if len(rest) < length:
                return
            self._data = rest[length:]
            self._answer(head, rest[:length])

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):
            self._whole(json.dumps({"0": {"engine_id": "stub", "worker_addr": {}}}).encode())
        elif b'"stream":true' in body:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            self._next(0)
        else:
            self._whole(b'{"choices":[{"index":0,"text":"a","finish_reason":"length"}]}')

    def _whole(self, body: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _next(self, number: int) -> None:
        data = (
            b'{"id":"cmpl-0123456789abcdef","object":"text_completion","created":1764000000,"model":"stub","choices":'
            b'[{"index":0,"text":" word%d","logprobs":null,"finish_reason":null,"stop_reason":null}]}' % number
        )
        last = number == CHUNKS - 1
        event = b"data: %b\n\n%b" % (data, b"data: [DONE]\n\n" if last else b"")
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(event), event, b"0\r\n\r\n" if last else b""))
        if not last:
            self._loop.call_later(self._gap_s, self._next, number + 1)


class _Client(asyncio.Protocol):
    """One keep-alive connection that asks one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.first, self._tail, self._done = transport, 0.0, b"", None
        self.events = 0

    def ask(self, request: bytes) -> "asyncio.Future[None]":
        self.first, self._tail, self.events = 0.0, b"", 0
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: {")
        if not self.first and self.events:
            self.first = time.perf_counter()
        self._tail = (self._tail + data)[-64:]
        if self._tail.endswith(b"0\r\n\r\n") and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the connection was lost"))


def _request(port: int, greedy: bool) -> bytes:
    body = json.dumps(
        {"model": "stub", "prompt": _PROMPT, "max_tokens": CHUNKS, "stream": True, "temperature": 0 if greedy else 1},
        separators=(",", ":"),
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\naccept: */*\r\nuser-agent: bench\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Load:
    """Requests over pooled connections; keeps (time to first event, whole time) in seconds."""

    def __init__(self, port: int, greedy: bool) -> None:
        self._port, self._bytes = port, _request(port, greedy)
        self._idle: list[_Client] = []
        self.times: list[tuple[float, float]] = []

    async def one(self) -> None:
        loop = asyncio.get_running_loop()
        client = self._idle.pop() if self._idle else (await loop.create_connection(_Client, "127.0.0.1", self._port))[1]
        start = time.perf_counter()
        await client.ask(self._bytes)
        end = time.perf_counter()
        assert client.events == CHUNKS, client.events
        self._idle.append(client)
        self.times.append((client.first - start, end - start))

    async def at_rate(self, count: int, rate: float) -> None:
        start, tasks = time.perf_counter(), []
        for number in range(count):
            await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(self.one()))
        await asyncio.gather(*tasks)

    async def at_once(self, count: int, concurrency: int) -> float:
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                await self.one()

        start = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return count / (time.perf_counter() - start)


async def _measure(engine: int, proxy: int, options: argparse.Namespace, pid: int) -> None:
    direct, through = _Load(engine, options.greedy), _Load(proxy, options.greedy)
    for load in (direct, through):
        await load.at_once(200, 8)
        load.times.clear()
    used = 0.0
    for _ in range(4):
        await direct.at_rate(options.requests // 4, options.rate)
        before = _cpu_s(pid)
        await through.at_rate(options.requests // 4, options.rate)
        used += _cpu_s(pid) - before
    print(f"at {options.rate:g} requests/s, milliseconds          p50     p99")
    for place, what in ((0, "first event"), (1, "whole answer")):
        figures = {
            name: [1e3 * value for value in statistics.quantiles([times[place] for times in load.times], n=100)]
            for name, load in (("direct", direct), ("proxy", through))
        }
        for name, values in figures.items():
            print(f"  {what:<13} {name:<8}            {values[49]:8.2f} {values[98]:7.2f}")
        added = [figures["proxy"][place] - figures["direct"][place] for place in (49, 98)]
        print(f"  {what:<13} added               {added[0]:8.2f} {added[1]:7.2f}")
    print(f"  the proxy's CPU for each request      {1e3 * used / options.requests:8.2f}")
    for name, load in (("direct", direct), ("proxy", through)):
        before = _cpu_s(pid)
        rate = await load.at_once(options.requests, options.concurrency)
        used = (_cpu_s(pid) - before) / options.requests
        note = f", {1e3 * used:.2f} ms of the proxy's CPU each" if load is through else ""
        print(f"{options.concurrency} at once, {name}: {rate:.0f} requests/s{note}")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _serve_engine(port: int, gap_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Engine(gap_s), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rate", type=float, default=300.0, help="arrivals a second while latency is measured")
    parser.add_argument("--gap-ms", type=float, default=1.0, help="between two events of the engine")
    parser.add_argument("--prefill", action="store_true", help="give each request a prefill half too")
    parser.add_argument("--greedy", action="store_true", help="ask greedily: streams are remembered for resumption")
    parser.add_argument("--serve-engine", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_engine:
        uvloop.run(_serve_engine(options.serve_engine, options.gap_ms / 1e3))
        return
    cores = sorted(os.sched_getaffinity(0))
    engine_port, proxy_port = free_port(), free_port()
    engine_flags = [f"--serve-engine={engine_port}", f"--gap-ms={options.gap_ms}"]
    engine = subprocess.Popen([*_on_core(cores[-1]), sys.executable, "-m", "benchmarks.proxy", *engine_flags])
    engine_url = f"http://127.0.0.1:{engine_port}"
    halves = ["--prefill", engine_url, str(engine_port)] if options.prefill else []
    proxy = subprocess.Popen(
        [*_on_core(cores[0]), str(BIN / "mooncake_proxy"), f"--port={proxy_port}", *halves, "--decode", engine_url],
        stderr=subprocess.DEVNULL,
    )
    try:
        os.sched_setaffinity(0, {cores[-1]})
        wait_until(lambda: _is_up(proxy_port, options.prefill), what="the proxy")
        uvloop.run(_measure(engine_port, proxy_port, options, proxy.pid))
    finally:
        for process in (proxy, engine):
            process.terminate()
            process.wait()


def _on_core(core: int) -> list[str]:
    return ["taskset", "-c", str(core)]


def _is_up(port: int, prefill: bool) -> bool:
    from urllib.request import urlopen

    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
            return json.load(response)["prefill_instances"] == int(prefill)
    except OSError:
        return False


if __name__ == "__main__":
    main()
