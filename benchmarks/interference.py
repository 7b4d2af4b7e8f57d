"""What a background get does to the Python code of its own process.

    python -m benchmarks.interference [--pairs 20] [--json FILE]

A pure-Python loop runs beside a thread of the same process that gets batches of 128 MiB (64 keys x 32 pieces of
64 KiB), and, in turn, beside the same get at the same rate in another process.  Printed: the median over the pairs of
(time of the loop beside the inner get) / (beside the outer one), and the longest pause between two turns of the
inner loop.
"""

import argparse
import json
import statistics

from tests.processes import SETUP, Master, Worker

MIB = 1 << 20

PREPARE = """
import random, threading, time
import numpy as np
keys, pieces, size = 64, 32, 65536
memory = np.ones(keys * pieces * size, np.uint8)
base = memory.ctypes.data
assert store.register_buffer(base, memory.nbytes) == 0
order = random.Random(7).sample(range(keys), keys)
where = [[base + (layer * keys + order[k]) * size for layer in range(pieces)] for k in range(keys)]
sizes = [[size] * pieces for _ in range(keys)]
names = [f"kv{k}" for k in range(keys)]

def gets(stop, tally, pause):
    while not stop.is_set():
        assert store.batch_get_into_multi_buffers(names, where, sizes) == [pieces * size] * keys
        tally.append(time.perf_counter())
        if pause:
            time.sleep(pause)

def loop(seconds, spins=1000):
    quanta, longest = 0, 0.0
    start = last = time.perf_counter()
    while last - start < seconds:
        x = 0
        for i in range(spins):
            x += i * i
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
        quanta += 1
    return (last - start) / quanta, longest
"""
PUT = "assert store.batch_put_from_multi_buffers(names, where, sizes) == [0] * keys"
INNER = """
stop, tally = threading.Event(), []
thread = threading.Thread(target=gets, args=(stop, tally, pause))
thread.start()
result = loop(seconds)
stop.set(); thread.join()
result = [*result, len(tally)]
"""
OUTER = """
stop, tally = threading.Event(), []
threading.Timer(seconds, stop.set).start()
gets(stop, tally, pause)
result = len(tally)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each half of a pair")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two gets, the same on both sides")
    parser.add_argument("--json")
    options = parser.parse_args()
    master, workers = Master(), []
    try:
        for segment in (512 * MIB, 0, 0):
            worker = Worker()
            workers.append(worker)
            names = {"host": "127.0.0.1", "segment": segment, "buffer": 64 * MIB, "master": master.address}
            assert worker(SETUP, **names) == 0
            worker(PREPARE)
        owner, inside, outside = workers
        owner(PUT)
        ratios, pauses, rates = [], [], []
        for pair in range(options.pairs):
            halves = {}
            for half in ("inner", "outer") if pair % 2 else ("outer", "inner"):
                if half == "inner":
                    per_quantum, longest, count = inside(INNER, seconds=options.seconds, pause=options.pause)
                    pauses.append(longest * 1e3)
                else:
                    outside.send(OUTER, seconds=options.seconds + 0.1, pause=options.pause)
                    per_quantum, _ = inside("result = loop(seconds)", seconds=options.seconds)
                    count = outside.receive() * options.seconds / (options.seconds + 0.1)
                halves[half] = per_quantum
                rates.append((half, count * 128 * MIB / options.seconds / 1e9))
            ratios.append(halves["inner"] / halves["outer"])
        report = {
            "pairs": options.pairs,
            "slower_than_outside": statistics.median(ratios),
            "range": [min(ratios), max(ratios)],
            "longest_pause_ms": statistics.median(pauses),
            "worst_pause_ms": max(pauses),
            **{
                f"{half}_GBps": statistics.median(rate for side, rate in rates if side == half)
                for half in ("inner", "outer")
            },
        }
        print(json.dumps(report, indent=1))
        if options.json:
            with open(options.json, "w") as f:
                json.dump(report, f)
    finally:
        for worker in workers:
            worker.close()
        master.stop()


if __name__ == "__main__":
    main()
