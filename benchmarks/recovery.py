"""How long a master that was killed takes to know every value again.

    python -m benchmarks.recovery [--objects 1000000] [--servers 1] [--flags=...]

Puts objects of one granule with 115-byte keys (as vLLM's connector makes them) into the segments of `servers` private
segment servers, kills the master with SIGKILL, starts it again at once, and prints when its port answered, when the
acknowledged objects could be read (500 of them are asked for until all are there; counted from the start of the
process), the master's CPU time until then, how many of all could be, and the longest answer to an existence probe of
another process meanwhile.
"""

import argparse
import json
import time

from tests.processes import SETUP, Master, Worker

from benchmarks.master_memory import KEY_LENGTH, MIB, PREPARE, PUT, cpu_seconds, resident

FIND = """
import time
prefix = "SmolLM2-135M@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"
def name(i):
    return f"{prefix}{i:064x}".ljust(length, "=")
sample = [name(i) for i in range(0, objects, max(1, objects // 500))]
while not all(code == 1 for code in store.batch_is_exist(sample)) and time.monotonic() < limit:
    time.sleep(0.05)
result = time.monotonic()
"""
COUNT = """
found = 0
for at in range(0, objects, 5000):
    found += sum(code == 1 for code in store.batch_is_exist([name(i) for i in range(at, min(objects, at + 5000))]))
result = found
"""
PROBE = """
import socket, threading, time
from mooncake.rpc import messages as m
from mooncake.rpc.client import Connection, connect
stop = threading.Event()
worst = [0.0, 0]
def probe():
    while not stop.is_set():
        try:
            connection = Connection(connect(host, port, 0.2))
            connection.greet(m.Hello(m.PROTOCOL, "benchmark", "client", "9-9", host))
            while not stop.is_set():
                began = time.monotonic()
                connection.call(m.Exist(["none"]))
                worst[0] = max(worst[0], time.monotonic() - began)
                worst[1] += 1
                time.sleep(0.002)
        except Exception:
            time.sleep(0.01)
thread = threading.Thread(target=probe)
thread.start()
"""
PROBED = "stop.set(); thread.join(); result = worst"
LIMIT = 120.0


def measure(objects: int, servers: int, flags: list[str]) -> dict[str, object]:
    master = Master(*flags)
    workers = [Worker() for _ in range(servers)]
    prober = Worker()
    share = -(-objects // servers)  # a record takes two slots, of which a segment has one in 256 bytes
    try:
        names = {"host": "127.0.0.1", "segment": 4 * share * 256, "buffer": MIB, "master": master.address}
        for worker in workers:
            assert worker(SETUP, **names) == 0
            worker(PREPARE)
        failed = 0
        for first in range(0, objects, 50_000):
            for_whom = workers[first // 50_000 % servers]
            failed += for_whom(PUT, first=first, count=min(50_000, objects - first), length=KEY_LENGTH)
        master.kill()
        began = time.monotonic()
        master.start()
        answers = time.monotonic() - began
        prober(PROBE, host="127.0.0.1", port=master.port)
        last = workers[0](FIND, objects=objects, length=KEY_LENGTH, limit=began + LIMIT)
        used = cpu_seconds(master.process.pid)
        slowest, probes = prober(PROBED)
        found = workers[0](COUNT)
        return {
            "objects": objects,
            "servers": servers,
            "failed_puts": failed,
            "port_answers_s": round(answers, 3),
            "all_readable_s": round(last - began, 2),
            "readable": found,
            "master_cpu_s": round(used, 2),
            "slowest_probe_ms": round(slowest * 1e3, 1),
            "probes": probes,
            "master_MiB": round(resident(master.process.pid) / MIB),
        }
    finally:
        for worker in (*workers, prober):
            worker.kill()
        master.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--flags", nargs="*", default=[], help="of the master")
    options = parser.parse_args()
    print(json.dumps(measure(options.objects, options.servers, options.flags), indent=1))


if __name__ == "__main__":
    main()
