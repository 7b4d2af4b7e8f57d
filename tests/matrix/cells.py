"""The matrix: who is hurt × how × during what.  What makes no sense has its reason here; the rest is drawn from a seed.

A history is one deployment and the acts that happen to it, all of it decided by the seed; only time is real.
"""

import random
from dataclasses import dataclass

MASTER, SERVER, PRIVATE = "master", "segment server", "private server"
WRITER, READER, METADATA, ETCD = "writer", "reader", "metadata service", "etcd"
PROXY, PREFILL, DECODE = "proxy", "prefill", "decode"
VICTIMS = (MASTER, SERVER, PRIVATE, WRITER, READER, METADATA, ETCD, PROXY, PREFILL, DECODE)
OF_POOL = VICTIMS[:7]
OF_REQUESTS = VICTIMS[7:]

KILL, STOP_SHORT, STOP_LONG = "SIGKILL", "SIGSTOP within TTL", "SIGSTOP past TTL"
RESTART_SAME, RESTART_OTHER = "restart, same address", "restart, other address"
PARTITION, SLOW, DISK_FULL, MEMORY_FULL = "partition", "slow link", "full disk", "full memory"
FAULTS = (KILL, STOP_SHORT, STOP_LONG, RESTART_SAME, RESTART_OTHER, PARTITION, SLOW, DISK_FULL, MEMORY_FULL)
OF_NETWORKS = (PARTITION, SLOW)  # they need network namespaces

PUT, GET, BATCH, EVICTION, OFFLOAD, TASK, REQUEST = "put", "get", "batch", "eviction", "offload", "task", "P/D request"
WORKS = (PUT, GET, BATCH, EVICTION, OFFLOAD, TASK, REQUEST)

# Deployments.  LOCAL: all on loopback.  HOSTS: each process in a network namespace of its own.  REQUESTS: a proxy
# before stub engines.  HANDOVER: prefill and decode workers that push KV cache.
LOCAL, REQUESTS, HANDOVER = "local", "requests", "handover"
HOSTS, REQUESTS_HOSTS, HANDOVER_HOSTS = "hosts", "requests between hosts", "handover between hosts"
ON_HOSTS = (HOSTS, REQUESTS_HOSTS, HANDOVER_HOSTS)
SCENES = (LOCAL, REQUESTS, HANDOVER, *ON_HOSTS)


def why_not(victim: str, fault: str, work: str) -> str:
    """Why a cell makes no sense; "" if it does."""
    if (victim in OF_REQUESTS) != (work == REQUEST):
        return "a P/D request asks nothing of the pool; an engine that uses the pool is its writer and reader"
    if fault == RESTART_OTHER and victim in (MASTER, METADATA, ETCD):
        return "clients know it by one address"
    if fault == RESTART_OTHER and victim == PROXY:
        return "who sends requests chooses the address"
    if fault == DISK_FULL and victim != SERVER:
        return "it keeps no values on a disk"
    if fault == MEMORY_FULL and victim not in (SERVER, PRIVATE):
        return "it holds no memory of the pool"
    return ""


def cells() -> list[tuple[str, str, str]]:
    """All that make sense."""
    return [(v, f, w) for v in VICTIMS for f in FAULTS for w in WORKS if not why_not(v, f, w)]


def table() -> str:
    """All of them in Markdown, as docs/reliability.md shows them: victims down, faults across; `pool` stands for all
    works but the P/D request, a letter for why a cell is empty."""
    letters: dict[str, str] = {}
    rows = ["| | " + " | ".join(FAULTS) + " |", "|---" * (len(FAULTS) + 1) + "|"]
    for victim in VICTIMS:
        row = []
        for fault in FAULTS:
            kinds = ("P/D", REQUEST) if victim in OF_REQUESTS else ("pool", PUT)
            reason = why_not(victim, fault, kinds[1])
            row.append(letters.setdefault(reason, "abcdefgh"[len(letters)]) if reason else kinds[0])
        rows.append(f"| {victim} | " + " | ".join(row) + " |")
    return "\n".join([*rows, "", *(f"- {letter}: {reason}." for reason, letter in letters.items())])


@dataclass(frozen=True)
class Act:
    victim: str
    fault: str
    work: str
    before: float  # seconds of work before it happens
    hold: float  # seconds for which it stays, as a part of the longest
    seed: int  # of what the clients do

    def __str__(self) -> str:
        return f"{self.work}: {self.victim}, {self.fault}"


@dataclass(frozen=True)
class History:
    seed: int
    scene: str
    acts: tuple[Act, ...]
    disk: bool = False  # an SSD tier at the segment server
    etcd: bool = False  # the metadata service is etcd
    tcp: bool = False  # even on one host

    def __str__(self) -> str:
        more = [name for name in ("disk", "etcd", "tcp") if getattr(self, name)]
        return f"seed {self.seed}: {', '.join([self.scene, *more])}: " + "; ".join(map(str, self.acts))


def happens_in(scene: str, disk: bool, etcd: bool) -> list[tuple[str, str, str]]:
    """The cells that such a deployment can show."""

    def fits(victim: str, fault: str, work: str) -> bool:
        if scene in (LOCAL, HOSTS):
            return (
                victim in OF_POOL
                and (scene == HOSTS or fault not in OF_NETWORKS)
                and (disk or (work != OFFLOAD and fault != DISK_FULL))
                and victim != (METADATA if etcd else ETCD)
            )
        victims = (PREFILL, DECODE) if scene in (HANDOVER, HANDOVER_HOSTS) else OF_REQUESTS
        return victim in victims and (fault in OF_NETWORKS) == (scene in ON_HOSTS)

    return [cell for cell in cells() if fits(*cell)]


def choose(seed: int, scenes: tuple[str, ...] = SCENES, acts: int = 5) -> History:
    """The history of a seed.  Pool scenes come more often than the others, since most cells are theirs."""
    rng = random.Random(seed)
    scene = rng.choices(scenes, [4 if scene == LOCAL else 3 if scene == HOSTS else 1 for scene in scenes])[0]
    of_pool = scene in (LOCAL, HOSTS)
    disk, etcd = of_pool and rng.random() < 0.5, of_pool and rng.random() < 0.3
    tcp = rng.random() < 0.5
    possible = happens_in(scene, disk, etcd)
    chosen = []
    for _ in range(acts):
        victim = rng.choice(sorted({cell[0] for cell in possible}))
        fault = rng.choice(sorted({cell[1] for cell in possible if cell[0] == victim}))
        work = rng.choice(sorted({cell[2] for cell in possible if cell[:2] == (victim, fault)}))
        chosen.append(Act(victim, fault, work, rng.uniform(0.1, 0.6), rng.random(), rng.randrange(1 << 30)))
    return History(seed, scene, tuple(chosen), disk, etcd, tcp)
