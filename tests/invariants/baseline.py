"""What a scenario holds, and whether all of it is given back.

Two sides: the master's figures of what the pool holds, which are zero in an empty pool; and what each process and
the host hold, which must not be more than before.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POOL = (  # zero when nobody does anything and the pool is empty
    "master_allocated_bytes",
    "master_allocated_file_size_bytes",
    "master_key_count",
    "master_put_start_discarded_staging_size",
    "master_promotion_in_flight",
    "mooncake_quarantined_bytes",
    "mooncake_read_leases",
    "mooncake_open_puts",
    "mooncake_waiting_puts",
    "mooncake_drain_jobs",
    "mooncake_offload_queue",
)
KEPT = 6  # descriptors that a process may keep open in addition: pooled connections to whoever it met since


@dataclass(frozen=True)
class Held:
    """Of one process."""

    descriptors: int
    sockets: int
    threads: int
    mappings: int  # of the pool's memory
    deleted_mappings: int  # of memory or files whose name is gone

    @classmethod
    def by(cls, pid: int) -> "Held":
        targets = []
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                targets.append(os.readlink(entry))
        maps = Path(f"/proc/{pid}/maps").read_text()
        return cls(
            len(targets),
            sum(target.startswith("socket:") for target in targets),
            len(os.listdir(f"/proc/{pid}/task")),
            maps.count("mooncake-"),
            maps.count("(deleted)"),
        )

    def over(self, before: "Held", kept: int) -> list[str]:
        """What it has beyond `before`; `kept` more of what a pool of connections keeps."""
        room = {"descriptors": kept, "sockets": kept, "threads": kept, "mappings": 0, "deleted_mappings": 0}
        return [
            f"{getattr(self, name)} {name}, {getattr(before, name)} before"
            for name, more in room.items()
            if getattr(self, name) > getattr(before, name) + more
        ]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


class Baseline:
    """What processes hold now, by name; `excess` says what they have too much later on.

    A process that took the place of another under its name is measured against that one."""

    def __init__(self, processes: dict[str, int], kept: int = KEPT) -> None:
        self._kept = kept
        self._held = {name: Held.by(pid) for name, pid in processes.items()}
        self._shared = shared_memory()

    def excess(self, processes: dict[str, int]) -> list[str]:
        """Of these, and of the host."""
        found = []
        for name, pid in processes.items():
            found += [f"{name} has {text}" for text in Held.by(pid).over(self._held[name], self._kept)]
        ours = {entry for entry in shared_memory() - self._shared if "mooncake" in entry}
        return found + [f"/dev/shm/{entry} was left" for entry in ours]


def pool_excess(master: Any) -> list[str]:
    """What an idle and emptied pool still holds, by the master's figures."""
    figures = {}
    for line in master.get("/metrics").splitlines():
        name, _, number = line.rpartition(" ")
        if name in POOL:
            figures[name] = float(number)
    return [f"{name} is {number:g}" for name, number in figures.items() if number]


def settle(excess: Callable[[], list[str]], limit: float) -> list[str]:
    """What is still too much after at most `limit` seconds."""
    end = time.monotonic() + limit
    while found := excess():
        if time.monotonic() > end:
            return found
        time.sleep(0.1)
    return []
