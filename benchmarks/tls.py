"""Forced tcp with and without TLS, in turns.

    python -m benchmarks.tls [--rounds 7]

For each of the two, a master, a process that owns a segment and one that writes and reads it, all on loopback.  Prints
medians and their ratio: of values in one piece and of a batch of small pieces, alone and beside a thread of Python code
in the reader (the library of TLS gives out 16 KiB a call, and each call gives up the interpreter); and how long the
first put of a store takes, which makes two connections.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
from pathlib import Path

from tests.processes import SETUP, Master, Worker
from tests.security.authority import Authority

MIB = 1 << 20
CASES = {"64 MiB": (1, 1, 64 * MIB), "1 MiB": (64, 1, MIB), "64 keys × 32 pieces of 64 KiB": (64, 32, 64 << 10)}

PREPARE = """
import threading, time
import numpy as np
memory = np.ones(128 << 20, np.uint8)
base = memory.ctypes.data
assert store.register_buffer(base, memory.nbytes) == 0

def spin(stop):
    while not stop.is_set():
        sum(range(1000))
"""
MOVE = """
stop = threading.Event()
in_time = True
if busy:
    threading.Thread(target=spin, args=(stop,), daemon=True).start()
names = [f"k{i}" for i in range(keys)]
where = [[base + (k * pieces + i) * size for i in range(pieces)] for k in range(keys)]
sizes = [[size] * pieces] * keys
store.remove_all(force=True)
times = [time.perf_counter()]
if keys == 1 or pieces > 1:
    assert store.batch_put_from_multi_buffers(names, where, sizes) == [0] * keys
    times.append(time.perf_counter())
    got = store.batch_get_into_multi_buffers(names, where, sizes)
    in_time = got == [pieces * size] * keys
    assert in_time or set(got) <= {pieces * size, -707}
else:
    assert not any(store.put_from(names[k], where[k][0], size) for k in range(keys))
    times.append(time.perf_counter())
    assert all(store.get_into(names[k], where[k][0], size) == size for k in range(keys))
times.append(time.perf_counter())
stop.set()
total = keys * pieces * size / 1e9
result = [total / (times[1] - times[0]), in_time * total / (times[2] - times[1])]
"""
FIRST = """
other = MooncakeDistributedStore()
assert other.setup(host, "P2PHANDSHAKE", 0, buffer, "tcp", "", master) == 0
began = time.perf_counter()
assert other.put(f"first {began}", b"x" * 4096) == 0
result = 1e3 * (time.perf_counter() - began)
other.close()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = range(parser.parse_args().rounds)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        authority = Authority(Path(folder))
        pools = [_client(stack, variables) for variables in ({}, authority.variables(*authority.issue()))]
        print(f"{'':40}{'plain':>8}{'TLS':>8}  ratio (0: it took longer than the lease)")
        for busy in (False, True):
            for case, (keys, pieces, size) in CASES.items():
                names = {"keys": keys, "pieces": pieces, "size": size, "busy": busy}
                found = [[pool(MOVE, **names) for pool in pools] for _ in rounds]
                for way, what in enumerate(("put", "get")):
                    plain, tls = (statistics.median(one[pool][way] for one in found) for pool in (0, 1))
                    label = f"{case}, {what}{', busy' if busy else ''}"
                    print(f"{label:40}{plain:8.3f}{tls:8.3f}  {tls / plain if plain else 0:.2f}  GB/s")
        found = [[pool(FIRST) for pool in pools] for _ in rounds]
        plain, tls = (statistics.median(one[pool] for one in found) for pool in (0, 1))
        print(f"{'first put of a store':40}{plain:8.2f}{tls:8.2f}  {tls / plain:.2f}  ms")


def _client(stack: contextlib.ExitStack, variables: dict[str, str]) -> Worker:
    """Of a new pool whose processes have these variables."""
    os.environ.update(variables)
    master = Master()
    stack.callback(master.stop)
    for segment in (512 * MIB, 0):
        worker = Worker(env={"MC_FORCE_TCP": "1"})
        stack.callback(worker.close)
        names = {"host": "127.0.0.1", "segment": segment, "buffer": 16 * MIB, "master": master.address}
        assert worker(SETUP, **names) == 0
    worker(PREPARE)
    for name in variables:
        del os.environ[name]
    return worker


if __name__ == "__main__":
    main()
