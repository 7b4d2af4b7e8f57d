"""What a secret and checksums cost transfers over tcp, against a pool without either, in turns.

    python -m benchmarks.checksums [--repeats 15] [--mode tcp|always] [--no-secret] [--shm] [--others 0.2]

Two pools on loopback, each with a segment server, a master and a client of its own process (MC_FORCE_TCP=1, or shared
memory with --shm).  One puts and gets without a secret and without checksums, the other with both; each repetition
runs one and then the other, the order changing.  Printed are medians in GB/s and the ratio of the medians, of those
repetitions beside which other programs took no more than --others processors, and how many these are.
"""

import argparse
import os
import random
import statistics
import time
from pathlib import Path

from tests.processes import SETUP, Master, Worker, children

MIB = 1 << 20
CASES = (
    ("batch 64 x 32 x 32 KiB", 64, 32, 32768),
    ("batch 64 x 32 x 64 KiB", 64, 32, 65536),
    ("16 MiB", 8, 1, 16 * MIB),
)

CLIENT = """
import mmap, random, time
import numpy as np
room = mmap.mmap(-1, 272 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
room.madvise(mmap.MADV_HUGEPAGE)
memory = np.frombuffer(room, np.uint8)
memory[:] = np.tile(np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8), 272)
base, half = memory.ctypes.data, 136 << 20
assert store.register_buffer(base, memory.nbytes) == 0

def once(keys, pieces, size):
    order = random.Random(7).sample(range(keys), keys)
    source = [[base + (j * keys + order[i]) * size for j in range(pieces)] for i in range(keys)]
    target = [[address + half for address in addresses] for addresses in source]
    sizes = [[size] * pieces] * keys
    names = [f"k{i}" for i in range(keys)]
    started = time.perf_counter()
    if pieces == 1:
        assert [store.put_from(name, at[0], size) for name, at in zip(names, source)] == [0] * keys
    else:
        assert store.batch_put_from_multi_buffers(names, source, sizes) == [0] * keys
    put = time.perf_counter()
    if pieces == 1:
        assert [store.get_into(name, at[0], size) for name, at in zip(names, target)] == [size] * keys
    else:
        assert store.batch_get_into_multi_buffers(names, target, sizes) == [pieces * size] * keys
    got = time.perf_counter()
    assert (memory[: keys * pieces * size] == memory[half : half + keys * pieces * size]).all(), "WRONG BYTES"
    assert store.remove_all(force=True) == keys
    return [put - started, got - put]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--mode", default="tcp")
    parser.add_argument("--no-secret", action="store_true", help="checksums alone")
    parser.add_argument("--shm", action="store_true", help="over shared memory")
    parser.add_argument("--others", type=float, default=0.2, help="processors that other programs may take")
    parser.add_argument("--patience", type=float, default=120, help="seconds a case, to find quiet repetitions in")
    options = parser.parse_args()
    secret = {} if options.no_secret else {"MOONCAKE_AUTH_TOKEN": "a-secret-for-this-benchmark"}
    way = {} if options.shm else {"MC_FORCE_TCP": "1"}
    pools: list[_Pool] = []
    try:
        for settings in ({}, {**secret, "MOONCAKE_STORE_CHECKSUM": options.mode}):
            pools.append(_Pool(settings, way))
        for title, keys, pieces, size in CASES:
            call = f"result = once({keys}, {pieces}, {size})"
            taken: list[list[list[float]]] = [[], []]
            turns, give_up = 0, time.monotonic() + options.patience
            while min(map(len, taken)) < options.repeats and time.monotonic() < give_up:
                for which in random.sample((0, 1), 2):
                    result, others = pools[which].measure(call)
                    if turns and others <= options.others:
                        taken[which].append(result)
                turns += 1
            quiet = min(map(len, taken))
            if not quiet:
                print(f"{title}: none of {turns} repetitions was quiet")
                continue
            for at, what in enumerate(("put", "get")):
                plain, full = (statistics.median(one[at] for one in some) for some in taken)
                total = keys * pieces * size / 1e9
                print(
                    f"{title:<24}{what}  {total / plain:6.2f} GB/s  {total / full:6.2f} GB/s  ratio {plain / full:.3f}"
                    f"  ({quiet} of {turns} repetitions)"
                )
    finally:
        for pool in pools:
            pool.close()


class _Pool:
    def __init__(self, settings: dict[str, str], way: dict[str, str]) -> None:
        os.environ.update(settings)
        try:
            self._master = Master()
            self._owner = self._start(settings, 400 * MIB)
            self.client = self._start({**settings, **way}, 0)
        finally:
            for name in settings:
                del os.environ[name]
        self.client(CLIENT)

    def _start(self, settings: dict[str, str], segment: int) -> Worker:
        worker = Worker(env=settings)
        code = worker(SETUP, host="127.0.0.1", segment=segment, buffer=0, master=self._master.address)
        assert code == 0, "setup failed"
        return worker

    def measure(self, call: str) -> tuple[list[float], float]:
        """What the client says, and how many processors other programs took meanwhile."""
        began, busy, own = time.monotonic(), _busy(), self._own()
        result = self.client(call)
        return result, (_busy() - busy - (self._own() - own)) / (time.monotonic() - began)

    def _own(self) -> float:
        """Seconds of processors that this pool's processes have taken."""
        pids = [self.client.pid, self._owner.pid, self._master.process.pid, *children(self._owner.pid), os.getpid()]
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.client.close()
        self._owner.close()
        self._master.stop()


def _busy() -> float:
    """Seconds of processors that all programs have taken."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
