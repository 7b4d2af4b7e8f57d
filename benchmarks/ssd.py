"""The SSD tier beside what its disk does with direct 4 MiB writes and reads, in the same run.

    python -m benchmarks.ssd [--directory DIR] [--size-mib 2048] [--value-kib 4096] [--repeats 3]

    write       puts of all values until the last one is on disk; raw: one file of as many bytes
    read        gets of all values by a store whose server was killed, so that nothing is in memory; raw: the very files
                that the tier has written
    restart     from setup() until every value is known again

The tier's figures include all that a put and a get are.  Nothing is cached by the kernel; a drive's own cache is as it
is, for both.
"""

import argparse
import mmap
import os
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from tests.processes import Master, children, wait_until

from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20
STEP = 4 * MIB
FLAGS = os.O_RDWR | os.O_CREAT | os.O_DIRECT


def raw_write(path: Path, total: int, block: mmap.mmap) -> float:
    """Seconds that `total` bytes take in steps of 4 MiB."""
    fd = os.open(path, FLAGS, 0o600)
    started = time.perf_counter()
    for at in range(0, total, STEP):
        os.pwritev(fd, [block], at)
    took = time.perf_counter() - started
    os.close(fd)
    path.unlink()
    return took


def raw_read(paths: list[Path], block: mmap.mmap) -> tuple[float, int]:
    """Seconds, and bytes, of reading whole files in steps of 4 MiB."""
    total = 0
    started = time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        at = 0
        while got := os.preadv(fd, [block], at):
            at += got
        total += at
        os.close(fd)
    return time.perf_counter() - started, total


class Run:
    """One master, and stores that use `directory` one after another."""

    def __init__(self, directory: Path, total: int, value: int) -> None:
        self.directory = directory
        self.total, self.value = total, value
        self.keys = [f"value-{i}" for i in range(total // value)]
        self.master = Master("--enable_offload", "--eviction_high_watermark_ratio=1")
        self.room = mmap.mmap(-1, min(total, 256 * MIB), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = np.frombuffer(self.room, np.uint8)
        self.memory[:] = np.random.default_rng(1).integers(0, 255, self.memory.nbytes, np.uint8)
        self.base = self.memory.ctypes.data
        self.at_once = self.memory.nbytes // value

    def open(self, segment: int) -> tuple[MooncakeDistributedStore, int]:
        store = MooncakeDistributedStore()
        arguments = ("127.0.0.1", "P2PHANDSHAKE", segment, 0, "tcp", "", self.master.address)
        assert store.setup(*arguments, None, True, str(self.directory)) == 0
        assert store.register_buffer(self.base, self.memory.nbytes) == 0
        (server,) = (pid for pid in children(os.getpid()) if pid != self.master.process.pid)
        return store, server

    def batches(self) -> list[tuple[list[str], list[int], list[int]]]:
        found = []
        for at in range(0, len(self.keys), self.at_once):
            keys = self.keys[at : at + self.at_once]
            found.append((keys, [self.base + i * self.value for i in range(len(keys))], [self.value] * len(keys)))
        return found

    def write(self, store: MooncakeDistributedStore) -> float:
        wait_until(lambda: self.master.metric("mooncake_disk_tiers") == 1)
        before = self.master.metric("mooncake_disk_writes")
        time.sleep(3.0)  # the segment's memory is made resident in the background
        started = time.perf_counter()
        for keys, addresses, sizes in self.batches():
            while any(store.batch_put_from(keys, addresses, sizes)):
                time.sleep(0.01)  # memory is full, and the disk behind
        want = before + len(self.keys)
        wait_until(lambda: self.master.metric("file_cache_nums_") == len(self.keys), 300)
        took = time.perf_counter() - started
        wait_until(lambda: self.master.metric("mooncake_disk_writes") == want)
        return took

    def read(self, store: MooncakeDistributedStore) -> float:
        expected = self.memory.copy()
        started = time.perf_counter()
        for keys, addresses, sizes in self.batches():
            assert store.batch_get_into(keys, addresses, sizes) == sizes
        took = time.perf_counter() - started
        assert (self.memory == expected).all(), "WRONG BYTES"
        return took

    def restart(self) -> tuple[MooncakeDistributedStore, int, float]:
        started = time.perf_counter()
        store, server = self.open(64 * MIB)
        wait_until(lambda: store.is_exist(self.keys[-1]) == 1 and self.known() == len(self.keys), 60)
        return store, server, time.perf_counter() - started

    def known(self) -> float:
        return self.master.metric("master_key_count")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="on the disk to be measured (default: the current one)", default=".")
    parser.add_argument("--size-mib", type=int, default=2048)
    parser.add_argument("--value-kib", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    total, value = options.size_mib * MIB, options.value_kib << 10
    block = mmap.mmap(-1, STEP)
    block[:] = os.urandom(STEP)
    rates: dict[str, list[float]] = {name: [] for name in ("raw write", "write", "raw read", "read", "restart")}
    for _ in range(options.repeats):
        directory = Path(tempfile.mkdtemp(prefix="ssd-", dir=os.path.abspath(options.directory)))
        run = Run(directory, total, value)
        try:
            rates["raw write"].append(total / raw_write(directory / "raw", total, block) / 1e9)
            store, server = run.open(min(total + 64 * MIB, 2048 * MIB))
            rates["write"].append(total / run.write(store) / 1e9)
            os.kill(server, signal.SIGKILL)
            store.close()
            wait_until(lambda r=run: r.known() == 0)
            took, length = raw_read(sorted(directory.glob("tier-0/*.data")), block)
            rates["raw read"].append(length / took / 1e9)
            store, server, took = run.restart()
            rates["restart"].append(took)
            rates["read"].append(total / run.read(store) / 1e9)
            store.close()
        finally:
            run.master.stop()
            shutil.rmtree(directory, ignore_errors=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{total // value} values of {options.value_kib} KiB, medians of {options.repeats}")
    for verb in ("write", "read"):
        raw = medians[f"raw {verb}"]
        print(f"  {verb:<6} {medians[verb]:6.2f} GB/s   raw {raw:6.2f} GB/s   ratio {medians[verb] / raw:5.2f}")
    print(f"  restart {medians['restart']:5.2f} s")


if __name__ == "__main__":
    main()
