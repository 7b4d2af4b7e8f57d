"""Rates of the transfer engine between two processes of this host, beside the limits that they run against.

    python -m benchmarks.engine [--repeats 9] [--peer /other/venv/bin/python] [--only cma,tcp] [--json FILE]

Cases: cma (as installed) and tcp (MC_FORCE_TCP=1); block lists scattered at random, 1 GiB in one piece, and the latency
of a single 4 KiB.  Limits: for cma, process_vm_readv / process_vm_writev called straight on the same ranges of the same
memory, in turn with the engine's calls; for tcp, a loopback stream with 1 MiB calls.  With --peer the same cases run,
in turn, on whatever package that interpreter imports as `mooncake` (lists of 2,048 at most: the C++ engine refuses
longer ones).  Every figure is a median; the bytes of every list are compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.store import stream_rate

MIB = 1 << 20
LISTS = ((512, 65536), (2048, 4096), (4096, 65536))
PEER_LIST = 2048
# case, what, least share of the limit, least multiple of the peer
BARS = {
    ("cma", "list"): (0.8, 4.0),
    ("cma", "single"): (0.8, 3.0),
    ("tcp", "list"): (None, 1.5),
    ("tcp", "single"): (0.75, 1.1),
}

WORKER = r"""
import ctypes, hashlib, json, mmap, os, random, sys, time
import numpy as np
from mooncake.engine import TransferEngine
POOL = 1 << 30
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
room = mmap.mmap(-1, POOL, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
room.madvise(mmap.MADV_HUGEPAGE)
memory = np.frombuffer(room, np.uint8)
memory[:] = np.frombuffer(np.random.default_rng(os.getpid()).bytes(POOL), np.uint8)
base = memory.ctypes.data
assert engine.register_memory(base, POOL) == 0
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
libc = ctypes.CDLL(None)
for name in ("process_vm_readv", "process_vm_writev"):
    getattr(libc, name).restype = ctypes.c_ssize_t
    getattr(libc, name).argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]

def ranges(count, size, peer):
    here, there = (random.Random(seed).sample(range(POOL // size), count) for seed in (count, count + 1))
    return [base + at * size for at in here], [peer + at * size for at in there], [size] * count

def straight(op, pid, local, remote, lengths):
    call = libc.process_vm_writev if op == "write" else libc.process_vm_readv
    near, far = (np.array([addresses, lengths]).T.copy() for addresses in (local, remote))
    def run():
        for at in range(0, len(lengths), 1024):
            n = min(1024, len(lengths) - at)
            if call(pid, near.ctypes.data + 16 * at, n, far.ctypes.data + 16 * at, n, 0) != sum(lengths[at : at + n]):
                return -1
        return 0
    return run

def timed(call):
    start = time.perf_counter()
    assert call() == 0, "a call failed"
    return time.perf_counter() - start

def blocks(session, pid, peer, op, count, size, repeats, limit):
    local, remote, lengths = ranges(count, size, peer)
    many = getattr(engine, f"batch_transfer_sync_{op}")
    calls = [lambda: many(session, local, remote, lengths)]
    if limit:
        calls.append(straight(op, pid, local, remote, lengths))
    return measure(calls, repeats)

def single(session, pid, peer, op, size, repeats, limit):
    one = getattr(engine, f"transfer_sync_{op}")
    calls = [lambda: one(session, base, peer, size)]
    if limit:
        calls.append(straight(op, pid, [base], [peer], [size]))
    return measure(calls, repeats)

def measure(calls, repeats):
    times = [[] for _ in calls]
    for turn in range(repeats + 1):  # who comes second finds the data in the caches: take turns at that too
        order = list(zip(calls, times))
        for call, mine in order if turn % 2 else order[::-1]:
            mine.append(timed(call))
    return [sorted(mine[1:])[repeats // 2] for mine in times]

def digest(count, size, peer, ours):
    h = hashlib.blake2b()
    for at in ranges(count, size, peer)[0 if ours else 1]:
        h.update(memory[at - base : at - base + size])
    return h.hexdigest()

print("ready", json.dumps([f"127.0.0.1:{engine.get_rpc_port()}", os.getpid(), base]), flush=True)
for line in sys.stdin:
    name, *args = json.loads(line)
    print("answer", json.dumps(globals()[name](*args)), flush=True)
"""


class Process:
    """A Python process with an engine and 1 GiB of registered memory."""

    def __init__(self, python: str, forced: bool) -> None:
        env = {**os.environ, "MC_FORCE_TCP": "1"} if forced else dict(os.environ)
        self._process = subprocess.Popen(
            [python, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        self.session, self.pid, self.base = self._receive("ready")

    def __call__(self, *command: object) -> object:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._receive("answer")

    def _receive(self, word: str) -> object:
        for line in self._process.stdout:
            if line.startswith(word + " "):
                return json.loads(line[len(word) :])
        raise RuntimeError(f"a worker ended with {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Pair:
    """One implementation: the process that calls, and the one that is copied from and to."""

    def __init__(self, python: str, forced: bool) -> None:
        self.near, self.far = Process(python, forced), Process(python, forced)

    def run(self, name: str, *args: object) -> list[float]:
        return self.near(name, self.far.session, self.far.pid, self.far.base, *args)

    def equal(self, count: int, size: int) -> bool:
        return self.near("digest", count, size, self.far.base, True) == self.far(
            "digest", count, size, self.far.base, False
        )

    def close(self) -> None:
        self.near.close()
        self.far.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--peer", help="another interpreter, with another implementation of `mooncake`")
    parser.add_argument("--only", default="cma,tcp", help="which cases")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = []
    for case in options.only.split(","):
        pairs = {"ours": Pair(sys.executable, case == "tcp")}
        if options.peer:
            pairs["peer"] = Pair(options.peer, case == "tcp")
        try:
            rows += _case(case, pairs, options.repeats)
        finally:
            for pair in pairs.values():
                pair.close()
    missed = [row for row in rows if not row["met"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} meet their bars" + "".join(f"\n  not: {row}" for row in missed))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


def _case(case: str, pairs: dict[str, Pair], repeats: int) -> list[dict]:
    limits = case == "cma"
    stream = statistics.median(stream_rate() for _ in range(3)) if case == "tcp" else None
    print(f"{case}: " + (f"limit {stream:.2f} GB/s (one loopback stream)" if stream else "limit: process_vm_*v"))
    rows = []
    for what, shapes in (("list", LISTS), ("single", ((1, 1 << 30),))):
        for count, size in shapes:
            for op in ("write", "read"):
                row = {"case": case, "what": f"{op} {count} x {size}"}
                for side, pair in pairs.items():
                    args = (op, count, size) if what == "list" else (op, size)
                    name = "blocks" if what == "list" else "single"
                    if side == "peer" and count > PEER_LIST:
                        continue
                    times = pair.run(name, *args, repeats, limits and side == "ours")
                    row[side] = count * size / times[0] / 1e9
                    if side == "ours":
                        assert what == "single" or pair.equal(count, size), "WRONG BYTES"
                        row["limit"] = count * size / times[1] / 1e9 if limits else stream
                rows.append(_judged(row, *BARS[case, what]))
    for op in ("write", "read"):
        row = {"case": case, "what": f"{op} 4 KiB, us"}
        for side, pair in pairs.items():
            row[side] = pair.run("single", op, 4096, 2000, False)[0] * 1e6
        row["met"] = case == "tcp" or row["ours"] <= row.get("peer", row["ours"])
        print(
            f"  {row['what']:<22} {row['ours']:8.1f} us   " + (f"peer {row['peer']:8.1f} us" if "peer" in row else "")
        )
        rows.append(row)
    return rows


def _judged(row: dict, share: float | None, multiple: float) -> dict:
    of_limit = row["ours"] / row["limit"]
    of_peer = row["ours"] / row["peer"] if "peer" in row else None
    row["met"] = (share is None or of_limit >= share) and (of_peer is None or of_peer >= multiple)
    against = f"{of_peer:6.2f} x peer" if of_peer else ""
    print(f"  {row['what']:<22} {row['ours']:8.3f} GB/s  {of_limit:5.2f} of limit  {against}")
    return row


if __name__ == "__main__":
    main()
