"""What an object costs the master, and what an idle one costs the machine.

    python -m benchmarks.master_memory [--objects 1000000]

Puts objects of one granule with 115-byte keys (as vLLM's connector makes them) and prints the growth of the master's
resident memory per object, its idle memory and CPU, and how long it takes to stop.
"""

import argparse
import json
import time
from pathlib import Path

from tests.processes import SETUP, Master, Worker

MIB = 1 << 20
KEY_LENGTH = 115

PREPARE = """
import numpy as np
data = np.ones(256, np.uint8)
base = data.ctypes.data
assert store.register_buffer(base, 256) == 0
"""
PUT = """
failed = 0
for at in range(first, first + count, 1000):
    prefix = "SmolLM2-135M@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"
    keys = [f"{prefix}{i:064x}".ljust(length, "=") for i in range(at, at + 1000)]
    failed += sum(code != 0 for code in store.batch_put_from(keys, [base] * 1000, [256] * 1000))
result = failed
"""


def resident(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) * 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=1_000_000)
    options = parser.parse_args()
    started = time.perf_counter()
    master = Master()
    ready = time.perf_counter() - started
    worker = Worker()
    try:
        names = {"host": "127.0.0.1", "segment": 2 * options.objects * 256, "buffer": MIB, "master": master.address}
        assert worker(SETUP, **names) == 0
        worker(PREPARE)
        time.sleep(2)
        idle, before = resident(master.process.pid), cpu_seconds(master.process.pid)
        time.sleep(5)
        busy = (cpu_seconds(master.process.pid) - before) / 5
        failed, slowest = 0, 0.0
        step = 50_000
        for first in range(0, options.objects, step):
            began = time.perf_counter()
            failed += worker(PUT, first=first, count=min(step, options.objects - first), length=KEY_LENGTH)
            slowest = max(slowest, (time.perf_counter() - began) / step)
        time.sleep(1)
        grown = resident(master.process.pid) - idle
        began = time.perf_counter()
        master.stop()
        print(
            json.dumps(
                {
                    "ready_s": round(ready, 3),
                    "idle_MiB": round(idle / MIB, 1),
                    "idle_cpu_percent": round(busy * 100, 2),
                    "objects": options.objects,
                    "failed_puts": failed,
                    "bytes_per_object": round(grown / options.objects),
                    "slowest_put_us": round(slowest * 1e6, 1),
                    "stop_s": round(time.perf_counter() - began, 3),
                },
                indent=1,
            )
        )
    finally:
        worker.close()
        master.stop()


if __name__ == "__main__":
    main()
