"""A client of the storm: puts, gets, removes and overwrites self-describing values until told to end, and checks every
byte that it reads.

    python -m tests.faults.storm_client MASTER SEED SECONDS REPORT KEYS LARGEST

The report is one JSON line.
"""

import ctypes
import json
import random
import sys
import time

import numpy as np

from mooncake.store import MooncakeDistributedStore
from tests.invariants.values import SMALLEST, value, version_of


def main() -> None:
    master, seed, seconds, report, keys, largest = sys.argv[1:7]
    rng = random.Random(int(seed))
    keys, largest = int(keys), int(largest)
    store = MooncakeDistributedStore()
    while store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master):
        time.sleep(0.1)
    room = np.zeros(8 * largest, np.uint8)
    base = room.ctypes.data
    if rng.random() < 0.5:
        store.register_buffer(base, room.nbytes)
    wrong: list[str] = []
    slowest: dict[str, float] = {}
    codes: dict[str, int] = {}
    end = time.monotonic() + float(seconds)
    version = int(seed) * 100_000

    def made(key: int, size: int) -> bytes:
        return value(f"k{key}", version, size)

    def check(key: int, got: bytes, how: str) -> None:
        _, why = version_of(f"k{key}", got)
        if why:
            wrong.append(f"{how} k{key}: {why}")

    while time.monotonic() < end:
        key = rng.randrange(keys)
        version += 1
        size = min(
            largest, int(SMALLEST + 2 ** rng.uniform(0, 1) * rng.choice((1, 300, 5000, 70_000, 300_000, 900_000)))
        )
        what = rng.choice(
            (
                "put",
                "put",
                "parts",
                "batch",
                "overwrite",
                "get",
                "get",
                "into",
                "get_batch",
                "multi",
                "buffer",
                "exist",
                "remove",
            )
        )
        start = time.monotonic()
        code: object = 0
        if what == "put":
            code = store.put(f"k{key}", made(key, size))
        elif what == "parts":
            data = made(key, size)
            cut = rng.randrange(size)
            code = store.put_parts(f"k{key}", data[:cut], data[cut:])
        elif what == "batch":
            some = [rng.randrange(keys) for _ in range(6)]
            code = store.put_batch([f"k{k}" for k in some], [made(k, 4096) for k in some])
        elif what == "overwrite":
            store.remove(f"k{key}", force=True)
            code = store.put(f"k{key}", made(key, size))
        elif what == "get":
            got = store.get(f"k{key}")
            if got:
                check(key, got, what)
        elif what == "into":
            code = store.get_into(f"k{key}", base, largest)
            if code > 0:
                check(key, ctypes.string_at(base, code), what)
                code = 0
        elif what == "get_batch":
            some = [rng.randrange(keys) for _ in range(8)]
            for k, got in zip(some, store.get_batch([f"k{k}" for k in some]), strict=True):
                if got:
                    check(k, got, what)
        elif what == "multi":
            some = [rng.randrange(keys) for _ in range(8)]
            for i, (k, n) in enumerate(
                zip(
                    some,
                    store.batch_get_into(
                        [f"k{k}" for k in some], [base + i * largest for i in range(8)], [largest] * 8
                    ),
                    strict=True,
                )
            ):
                if n > 0:
                    check(k, ctypes.string_at(base + i * largest, n), what)
        elif what == "buffer":
            handle = store.get_buffer(f"k{key}")
            if handle is not None:
                check(key, handle[:], what)
        elif what == "exist":
            code = store.is_exist(f"k{key}")
            code = 0 if code == 1 else code
        else:
            code = store.remove(f"k{key}", force=rng.random() < 0.7)
        took = time.monotonic() - start
        if took > slowest.get(what, 0):
            slowest[what] = took
        name = f"{what}:{code}"
        codes[name] = codes.get(name, 0) + 1
    with open(report, "w") as f:
        json.dump({"wrong": wrong, "slowest": slowest, "codes": codes}, f)
    store.close()


if __name__ == "__main__":
    main()
