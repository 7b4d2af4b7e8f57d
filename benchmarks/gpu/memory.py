"""Rates between GPU memory and the pool, and between two processes' GPU memory, beside the limits they run against.

    python -m benchmarks.gpu.memory [--only limits,store,overhead,engine,beside] [--repeats 7] [--json FILE]

Needs one NVIDIA GPU, torch and 24 GiB of memory.  Starts a master on loopback.  `store`: values of one block a key in
64 pieces, as vLLM's connector makes them, 512 MiB a call, between scattered blocks and this process's own segment; the
limit is a pinned copy of the same size by torch, in turn.  `overhead`: how much longer a call of 64 keys x 64 pieces of
32 KiB takes than the copy alone.  `engine`: lists between two processes on the same card, beside a device copy.
`beside`: how much slower a stream of 8192^3 bf16 products runs beside saves and loads.  Bytes are compared every time;
figures are medians.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

MIB = 1 << 20
CALL = 512 * MIB
POOL = 8 << 30  # bytes: nothing is evicted
BLOCKS = (4 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 2 << 20)
BARS = {32 << 10: 45.0, 256 << 10: 48.0}  # GB/s

TARGET = """
import json, sys, torch
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = torch.randint(0, 256, (2 << 30,), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
assert engine.register_memory(memory.data_ptr(), memory.nbytes) == 0
print(json.dumps([f"127.0.0.1:{engine.get_rpc_port()}", memory.data_ptr()]), flush=True)
for line in sys.stdin:
    at, count = json.loads(line)
    print(int(memory[at : at + count].long().sum()), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="limits,store,overhead,engine,beside")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    wanted = options.only.split(",")
    import torch

    results: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    print(results["device"], flush=True)
    if "limits" in wanted:
        results["limits"] = limits(options.repeats)
    if {"store", "overhead", "beside"} & set(wanted):
        with a_store(POOL) as store:
            if "store" in wanted:
                results["store"] = [store_case(store, size, options.repeats) for size in BLOCKS]
            if "overhead" in wanted:
                results["overhead"] = overhead(store, options.repeats)
            if "beside" in wanted:
                results["beside"] = beside(store)
    if "engine" in wanted:
        results["engine"] = engine(options.repeats)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


def timed(call: Callable[[], Any]) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def rate(size: int, seconds: list[float]) -> float:
    return size / statistics.median(seconds) / 1e9


def limits(repeats: int) -> dict[str, float]:
    import torch

    host = torch.empty(CALL, dtype=torch.uint8, pin_memory=True)
    near, far = (torch.empty(CALL, dtype=torch.uint8, device="cuda") for _ in range(2))
    found = {}
    for name, call in (
        ("device to pinned host", lambda: host.copy_(near, non_blocking=True)),
        ("pinned host to device", lambda: near.copy_(host, non_blocking=True)),
        ("device to device", lambda: far.copy_(near)),
    ):
        call()
        found[name] = rate(CALL, [timed(call) for _ in range(repeats)])
        print(f"limit: {name} {found[name]:.1f} GB/s", flush=True)
    return found


@contextmanager
def a_store(size: int):
    from mooncake.store import MooncakeDistributedStore

    with socket.socket() as probe, socket.socket() as other:
        probe.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics = probe.getsockname()[1], other.getsockname()[1]
    code = "import sys; from mooncake.cli.master import main; main()"
    flags = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}", "--metrics_host=127.0.0.1"]
    master = subprocess.Popen([sys.executable, "-c", code, *flags], stdout=subprocess.DEVNULL)
    store = MooncakeDistributedStore()
    try:
        until(lambda: reachable(port))
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", size, 256 * MIB, "tcp", "", f"127.0.0.1:{port}") == 0
        yield store
    finally:
        store.close()
        master.terminate()
        master.wait()


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition: Callable[[], bool], limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


class Blocks:
    """Paged KV of `layers` tensors: block b of layer l is row b of tensor l; values are blocks, in mixed order."""

    def __init__(self, store, blocks: int, layers: int, size: int) -> None:
        import torch

        self.store, self.blocks = store, blocks
        self.source = torch.randint(0, 256, (layers, 2 * blocks, size), dtype=torch.uint8, device="cuda")
        self.target = torch.zeros_like(self.source)
        for tensor in (self.source, self.target):
            assert store.register_buffer(tensor.data_ptr(), tensor.nbytes) == 0
        self.order = torch.randperm(2 * blocks)[:blocks]
        self.sizes = [[size] * layers] * blocks
        self.bytes = blocks * layers * size
        self.put_from, self.get_into = (
            [
                [tensor.data_ptr() + (layer * 2 * blocks + block) * size for layer in range(layers)]
                for block in self.order.tolist()
            ]
            for tensor in (self.source, self.target)
        )

    def put(self, name: str) -> None:
        keys = [f"{name}-{i}" for i in range(self.blocks)]
        codes = self.store.batch_put_from_multi_buffers(keys, self.put_from, self.sizes)
        assert codes == [0] * len(keys), codes[:3]

    def get(self, name: str) -> None:
        keys = [f"{name}-{i}" for i in range(self.blocks)]
        got = self.store.batch_get_into_multi_buffers(keys, self.get_into, self.sizes)
        assert got == [sum(sizes) for sizes in self.sizes], got[:3]

    def check(self) -> None:
        assert bool((self.source[:, self.order] == self.target[:, self.order]).all()), "other bytes than were put"

    def close(self) -> None:
        for tensor in (self.source, self.target):
            assert self.store.unregister_buffer(tensor.data_ptr()) == 0
        self.store.remove_all(True)
        time.sleep(0.5)  # what was removed is free once its owner has confirmed it


def wait_for_pins() -> None:
    """Pool memory is pinned in the background."""
    try:
        from mooncake.transfer.cuda.pins import pins
    except ImportError:
        return
    until(lambda: pins.pinned >= POOL)


def store_case(store, size: int, repeats: int) -> dict[str, float]:
    import torch

    layers = 64 if size < MIB else 1
    blocks = Blocks(store, CALL // (layers * size), layers, size)
    host = torch.empty(CALL, dtype=torch.uint8, pin_memory=True)
    flat = torch.empty(CALL, dtype=torch.uint8, device="cuda")
    blocks.put("warm")
    wait_for_pins()
    figures: dict[str, list[float]] = {"put": [], "get": [], "out": [], "in": []}
    for turn in range(repeats):
        name = f"{size}-{turn}"
        figures["put"].append(timed(lambda name=name: blocks.put(name)))
        figures["out"].append(timed(lambda: host.copy_(flat, non_blocking=True)))
        blocks.target.zero_()
        figures["get"].append(timed(lambda name=name: blocks.get(name)))
        figures["in"].append(timed(lambda: flat.copy_(host, non_blocking=True)))
        blocks.check()
    blocks.close()
    rates = {name: rate(blocks.bytes, seconds) for name, seconds in figures.items()}
    bar = BARS.get(size)
    ok = "" if bar is None else f" (bar {bar:.0f}: {'met' if min(rates['put'], rates['get']) >= bar else 'MISSED'})"
    print(
        f"store, pieces of {size >> 10} KiB: put {rates['put']:.1f} get {rates['get']:.1f} GB/s; "
        f"pinned copies {rates['out']:.1f} and {rates['in']:.1f}{ok}",
        flush=True,
    )
    return {"size": size, **rates}


def overhead(store, repeats: int) -> dict[str, float]:
    """64 keys x 64 pieces of 32 KiB: the call against the copy of the same pieces alone."""
    import numpy as np
    import torch

    from mooncake.transfer.cuda.device import device
    from mooncake.transfer.cuda.pins import pins
    from mooncake.transfer.pieces import flatten, pieces_of

    blocks = Blocks(store, 64, 64, 32 << 10)
    gpu = device(torch.cuda.current_device())
    host = np.zeros(blocks.bytes, np.uint8)
    pins.pin(gpu.context, host.ctypes.data, host.nbytes)
    pieces, into = flatten(blocks.put_from, blocks.sizes), flatten(blocks.get_into, blocks.sizes)
    room = pieces_of([host.ctypes.data], [blocks.bytes])
    figures: dict[str, list[float]] = {"put": [], "copy out": [], "get": [], "copy in": []}
    for turn in range(3 * repeats):
        name = f"overhead-{turn}"
        figures["put"].append(timed(lambda name=name: blocks.put(name)))
        figures["copy out"].append(timed(lambda: gpu.write_out(pieces, room)))
        figures["get"].append(timed(lambda name=name: blocks.get(name)))
        figures["copy in"].append(timed(lambda: gpu.read_in(room, into)))
        if turn % 8 == 7:
            store.remove_all(True)
    pins.release(host.ctypes.data)
    blocks.check()
    blocks.close()
    found = {name: statistics.median(seconds) * 1e3 for name, seconds in figures.items()}
    for call, copy in (("put", "copy out"), ("get", "copy in")):
        over = found[call] - found[copy]
        print(
            f"overhead, 64 keys x 64 x 32 KiB: {call} {found[call]:.2f} ms, the copy {found[copy]:.2f} ms, "
            f"so {over:.2f} ms over it (bar 1: {'met' if over <= 1 else 'MISSED'})",
            flush=True,
        )
    return found


def engine(repeats: int) -> list[dict[str, Any]]:
    import torch

    from mooncake.engine import TransferEngine

    target = subprocess.Popen(
        [sys.executable, "-c", TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert target.stdin is not None
    assert target.stdout is not None
    session, there = json.loads(target.stdout.readline())
    us = TransferEngine()
    assert us.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = torch.randint(0, 256, (2 << 30,), dtype=torch.uint8, device="cuda")
    assert us.register_memory(memory.data_ptr(), memory.nbytes) == 0
    copy = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    results = []
    for count, size in ((1, 1 << 30), (4096, 256 << 10), (16384, 64 << 10), (512, 64 << 10)):
        rows = (2 << 30) // size
        near, far = torch.randperm(rows)[:count].tolist(), torch.randperm(rows)[:count].tolist()
        ours = [memory.data_ptr() + row * size for row in near]
        theirs = [there + row * size for row in far]
        lengths = [size] * count
        total = count * size
        figures: dict[str, list[float]] = {"write": [], "read": [], "copy": []}
        for _ in range(repeats):
            for op in ("write", "read"):
                call = partial(getattr(us, f"batch_transfer_sync_{op}"), session, ours, theirs, lengths)
                figures[op].append(timed(partial(check, call)))
            figures["copy"].append(timed(partial(copy[:total].copy_, memory[:total])))
        row = far[-1]
        target.stdin.write(json.dumps([row * size, size]) + "\n")
        assert int(target.stdout.readline()) == int(memory[near[-1] * size : (near[-1] + 1) * size].long().sum())
        rates = {name: rate(total, seconds) for name, seconds in figures.items()}
        share = min(rates["write"], rates["read"]) / rates["copy"]
        ok = f"bar 0.7: {'met' if share >= 0.7 else 'MISSED'}"
        print(
            f"engine, GPU to GPU of another process, {count} x {size >> 10} KiB: write {rates['write']:.0f} read "
            f"{rates['read']:.0f} GB/s, a device copy {rates['copy']:.0f}: {share:.2f} of it ({ok})",
            flush=True,
        )
        results.append({"count": count, "size": size, **rates, "stats": us.transfer_stats()})
    print("bytes by transport:", us.transfer_stats(), flush=True)
    target.stdin.close()
    target.wait()
    return results


def check(call: Callable[[], int]) -> None:
    code = call()
    assert code == 0, code


def beside(store) -> dict[str, float]:
    """Matrix products in a stream of their own, alone and beside saves or loads of 32 KiB pieces."""
    import torch

    blocks = Blocks(store, 64, 64, 32 << 10)
    blocks.put("beside")
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def products(count: int = 60) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            torch.mm(left, right, out=out)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    products()
    found: dict[str, float] = {}
    alone, saves, loads, rates = [], [], [], {"save": [], "load": []}
    for turn in range(5):
        alone.append(products())
        for name, times in (("save", saves), ("load", loads)):
            stop = threading.Event()

            def run(name: str = name, turn: int = turn, stop: threading.Event = stop) -> None:
                calls, start = 0, time.perf_counter()
                while not stop.is_set():
                    if name == "load":
                        blocks.get("beside")
                    else:
                        blocks.put(f"{turn}-{calls}")
                    calls += 1
                rates[name].append(calls * blocks.bytes / (time.perf_counter() - start) / 1e9)

            thread = threading.Thread(target=run)
            thread.start()
            time.sleep(0.02)
            times.append(products())
            stop.set()
            thread.join()
    found["products, ms"] = statistics.median(alone)
    for name, times in (("save", saves), ("load", loads)):
        found[f"beside {name}s"] = statistics.median(times) / statistics.median(alone)
        found[f"{name}s, GB/s"] = statistics.median(rates[name])
        print(
            f"beside {name}s at {found[f'{name}s, GB/s']:.1f} GB/s, 8192^3 products take "
            f"{found[f'beside {name}s']:.2f} of their time alone ({found['products, ms']:.2f} ms)",
            flush=True,
        )
    blocks.close()
    return found


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    main()
