"""Rates of the store's calls, each beside the limit that it runs against, measured in the same run.

    python -m benchmarks.store [--repeats 5] [--peer /other/venv/bin/python] [--json FILE]

Cases: local (the process that owns the segment), remote (another process of the host), tcp (the same with
MC_FORCE_TCP=1); batches shaped as an engine's KV cache, and single values.  Limits: memcpy of 64 MiB for local, a
copy out of a shared mapping for remote, a loopback stream with 1 MiB calls for tcp.  With --peer the same cases run,
in turn, on whatever package that interpreter imports as `mooncake`; the last column is the ratio of the medians.
"""

import argparse
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.processes import free_port, wait_until

MIB = 1 << 20
BATCHES = ((64, 32, 32768), (64, 32, 65536), (64, 32, 131072))
SINGLES = (65536, MIB, 16 * MIB, 64 * MIB)

WORKER = r"""
import json, mmap, random, sys, time
import numpy as np
from mooncake.store import MooncakeDistributedStore
MIB = 1 << 20
store = MooncakeDistributedStore()
role, master, segment, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 512 * MIB, "tcp", "", master) == 0
room = mmap.mmap(-1, 512 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
room.madvise(mmap.MADV_HUGEPAGE)
memory = np.frombuffer(room, np.uint8)
memory[:] = 1
base, half = memory.ctypes.data, 256 * MIB
assert store.register_buffer(base, memory.nbytes) == 0

def lists(keys, pieces, size, start):
    order = random.Random(7).sample(range(keys), keys)
    where = [[start + (j * keys + order[i]) * size for j in range(pieces)] for i in range(keys)]
    return where, [[size] * pieces] * keys

def timed(call, times=1):
    start = time.perf_counter()
    for i in range(times):
        assert call(i), "a call failed"
    return (time.perf_counter() - start) / times

def batch(keys, pieces, size):
    total = keys * pieces * size
    source, sizes = lists(keys, pieces, size, base)
    target, _ = lists(keys, pieces, size, base + half)
    puts, gets = [], []
    for r in range(repeats + 1):
        names = [f"b{size}-{r}-{k}" for k in range(keys)]
        puts.append(timed(lambda i: store.batch_put_from_multi_buffers(names, source, sizes) == [0] * keys))
        gets.append(timed(lambda i: store.batch_get_into_multi_buffers(names, target, sizes) == [pieces * size] * keys))
        store.remove_all(force=True)
    assert (memory[:total] == memory[half:half + total]).all(), "WRONG BYTES"
    return puts[1:], gets[1:], total

def single(size):
    count = max(4, min(200, 128 * MIB // size))
    puts, gets = [], []
    for r in range(repeats + 1):
        puts.append(timed(lambda i: store.put_from(f"s{r}-{i}", base + i * size % half, size) == 0, count))
        gets.append(timed(lambda i: store.get_into(f"s{r}-{i}", base + half, size) == size, count))
        store.remove_all(force=True)
    return puts[1:], gets[1:], size

def returned(size):
    data = bytes(size)
    count = max(4, min(200, 128 * MIB // size))
    puts, gets = [], []
    for r in range(repeats + 1):
        puts.append(timed(lambda i: store.put(f"g{r}-{i}", data) == 0, count))
        gets.append(timed(lambda i: len(store.get(f"g{r}-{i}")) == size, count))
        store.remove_all(force=True)
    return puts[1:], gets[1:], size

if role == "owner":
    for i in range(segment * 8 // 10 // (32 * MIB)):
        store.put(f"touch{i}", bytes(32 * MIB))
    store.remove_all(force=True)
print("ready", flush=True)
for line in sys.stdin:
    name, *args = json.loads(line)
    if name == "quit":
        break
    print(json.dumps(globals()[name](*args)), flush=True)
store.close()
"""


class Side:
    """One implementation: its master, an owner and another process."""

    def __init__(self, python: str, forced: bool, repeats: int) -> None:
        self.port = free_port()
        master = Path(python).parent / "mooncake_master"
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.master = subprocess.Popen(
            [master, f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}"], **quiet
        )
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", self.port)) == 0, what="the master's port")
        env = {**os.environ, "MC_FORCE_TCP": "1"} if forced else dict(os.environ)
        self.workers = {}
        for role, segment in (("owner", 2048 * MIB), ("other", 0)):
            worker = subprocess.Popen(
                [python, "-c", WORKER, role, f"127.0.0.1:{self.port}", str(segment), str(repeats)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=env,
            )
            self.workers[role] = worker
            while (line := worker.stdout.readline()) != "ready\n":
                assert line, f"the {role} of {python} did not start"

    def run(self, role: str, *command: object) -> tuple[list[float], list[float], int] | None:
        worker = self.workers[role]
        worker.stdin.write(json.dumps(command) + "\n")
        worker.stdin.flush()
        for line in worker.stdout:
            if line.startswith("["):
                return tuple(json.loads(line))
        return None

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.wait()
        self.master.terminate()
        self.master.wait()


def memcpy_rate() -> float:
    import numpy as np

    def touched() -> np.ndarray:
        room = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(room, np.uint8)
        array[:] = 1
        return array

    return _rate(touched(), touched())


def shared_rate() -> float:
    import numpy as np

    fd = os.memfd_create("benchmark")
    os.ftruncate(fd, 64 * MIB)
    source = np.frombuffer(mmap.mmap(fd, 64 * MIB), np.uint8)
    source[:] = 1
    os.close(fd)
    target = np.frombuffer(mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    target[:] = 1
    return _rate(target, source)


def _rate(target: object, source: object) -> float:
    import numpy as np

    times = []
    for _ in range(9):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return 64 * MIB / statistics.median(times) / 1e9


def stream_rate(total: int = 512 * MIB) -> float:
    """One loopback stream between two processes, 1 MiB calls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = (
            "import socket,sys; s=socket.create_connection(('127.0.0.1',int(sys.argv[1]))); b=bytes(1<<20)\n"
            f"for _ in range({total // MIB}): s.sendall(b)\n"
        )
        sender = subprocess.Popen([sys.executable, "-c", code, str(server.getsockname()[1])])
        stream, _ = server.accept()
        room = memoryview(bytearray(MIB))
        got = stream.recv_into(room)
        start = time.perf_counter()
        begun = got
        while got < total:
            got += stream.recv_into(room)
        rate = (total - begun) / (time.perf_counter() - start) / 1e9
        sender.wait()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", help="another interpreter, with another implementation of `mooncake`")
    parser.add_argument("--only", default="local,remote,tcp", help="which cases")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = []
    limits = {"local": memcpy_rate, "remote": shared_rate, "tcp": stream_rate}
    for case in options.only.split(","):
        sides = {"ours": Side(sys.executable, case == "tcp", options.repeats)}
        if options.peer:
            sides["peer"] = Side(options.peer, case == "tcp", options.repeats)
        try:
            limit = statistics.median(limits[case]() for _ in range(3))
            print(f"{case}: limit {limit:.2f} GB/s ({limits[case].__name__})")
            role = "owner" if case == "local" else "other"
            commands = [("batch", *shape) for shape in BATCHES]
            commands += [(name, size) for name in ("single", "returned") for size in SINGLES]
            for command in commands:
                got = {side: runner.run(role, *command) for side, runner in sides.items()}
                for i, verb in enumerate(("put", "get")):
                    rate = {s: r[2] / statistics.median(r[i]) / 1e9 for s, r in got.items() if r}
                    row = {"case": case, "what": " ".join(map(str, command)), "verb": verb, "limit": limit, **rate}
                    rows.append(row)
                    against = f"{rate['ours'] / rate['peer']:6.2f} x peer" if "peer" in rate else ""
                    share = rate["ours"] / limit
                    print(f"  {verb} {row['what']:<24} {rate['ours']:7.3f} GB/s  {share:5.2f} of limit  {against}")
        finally:
            for side in sides.values():
                side.close()
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
