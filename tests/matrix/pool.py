"""A pool as the matrix hurts it: a master, two segment servers, a metadata service, a writer and a reader.

On loopback, or with each of them in a network namespace of its own.  Everybody can be killed, stopped, started again
there or elsewhere, cut off, slowed, and filled.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from tests.engine.services import start_service
from tests.hosts import Hosts
from tests.invariants.cast import Cast
from tests.invariants.values import value, version_of
from tests.matrix.cells import ETCD, HOSTS, MASTER, METADATA, PRIVATE, READER, SERVER, WRITER, History
from tests.matrix.permissions import mount_small, unmount
from tests.processes import BIN, Master, Worker, children, free_port, stop, wait_until

MIB = 1 << 20
TTL = 3.0  # seconds: `client_ttl` of the master
SEGMENT = 24 * MIB
DISK = 96 * MIB
PLANTED, PLANT = 8, 20_000  # values in each segment that must not be lost, and bytes of one
SLOW = 8 * MIB  # bytes a second
PLACES = (MASTER, SERVER, PRIVATE, WRITER, READER, METADATA)  # of hosts, in this order
FLAGS = (
    f"--client_ttl={TTL:.0f}",
    "--default_kv_lease_ttl=500",
    "--put_start_discard_timeout_sec=1",
    "--put_start_release_timeout_sec=3",
)
OWNER_SETUP = """
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
result = store.setup(host, metadata, segment, 1 << 20, "tcp", "", master)
"""


class Pool:
    """All of it runs when it has been made; `stack` ends it."""

    def __init__(self, history: History, folder: Path, cast: Cast, stack: ExitStack) -> None:
        self.history, self.folder, self.cast, self._stack = history, folder, cast, stack
        self.hosts: Hosts | None = None
        if history.scene == HOSTS:
            self.hosts = Hosts(len(PLACES), reachable=True)
            stack.callback(self.hosts.close)
        self._addresses: dict[str, str] = {}
        self.clients: dict[str, subprocess.Popen[str]] = {}
        self.notes: list[Path] = []
        self._numbers = 0
        self.why_no_full_disk = "there is no disk"
        self.disk = self._make_disk() if history.disk else None
        self._filled: Path | None = None
        self._pinned: list[str] = []
        self._plants = 0
        self._planted: dict[str, str] = {}  # key → who serves its segment
        offload = ("--enable_offload",) if history.disk else ()
        self.master = Master(*FLAGS, *offload, log=folder / "master.log", prefix=self._prefix(MASTER),
                             address=self._host(MASTER))  # fmt: skip
        stack.callback(self.master.stop)
        wait_until(self.master.answers, what="the master's port")
        kind = "etcd" if history.etcd else "http"
        self.metadata = start_service(kind, folder, self._host(METADATA), self._prefix(METADATA))
        stack.callback(self.metadata.close)
        self.server = self._start_server()
        self.owner = self._start_owner()
        stack.callback(lambda: self.owner.close())
        stack.callback(lambda: self._end(self.server))
        for role in (WRITER, READER):
            self._start_client(role)
            stack.callback(lambda role=role: self._end_client(role))
        self.probe = MooncakeDistributedStore()
        stack.callback(self.probe.close)
        code = self.probe.setup(self._outside(), "P2PHANDSHAKE", 0, 8 * MIB, "tcp", "", self.master.address)
        assert code == 0, f"the probe's setup returned {code}"
        wait_until(self.whole, 20, "the pool")
        self._enroll()

    # -- where everybody is

    def _host(self, role: str) -> str:
        if self.hosts is not None:
            return self.hosts.addresses[PLACES.index(role)]
        return self._addresses.get(role, "127.0.0.1")

    def _outside(self) -> str:
        return "127.0.0.1" if self.hosts is None else self.hosts.outside

    def _prefix(self, role: str) -> list[str]:
        return [] if self.hosts is None else self.hosts.inside(PLACES.index(role))

    def _make_disk(self) -> Path:
        disk = self.folder / "disk"
        disk.mkdir()
        self.why_no_full_disk = mount_small(disk, DISK)
        if not self.why_no_full_disk:
            self._stack.callback(unmount, disk)
        return disk

    # -- who runs

    def _environment(self) -> dict[str, str]:
        disk = {} if self.disk is None else {"MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(self.disk)}
        return {**os.environ, "MC_FORCE_TCP": "1" if self.history.tcp else "", **disk}

    def _start_server(self, port: int = 0) -> subprocess.Popen[bytes]:
        self._server_port = port or free_port()
        command = [
            *self._prefix(SERVER),
            str(BIN / "mooncake_client"),
            f"--host={self._host(SERVER)}",
            f"--port={self._server_port}",
            f"--metadata_server={self.metadata.address}",
            f"--master_server_address={self.master.address}",
            f"--global_segment_size={SEGMENT}",
            *(["--enable_offload"] if self.disk else []),
        ]
        log = open(self.folder / "server.log", "ab")  # noqa: SIM115
        with log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment())

    def _start_owner(self) -> Worker:
        worker = Worker(prefix=self._prefix(PRIVATE), env=self._environment())
        names = {"host": self._host(PRIVATE), "metadata": self.metadata.address, "segment": SEGMENT,
                 "master": self.master.address}  # fmt: skip
        wait_until(lambda: worker(OWNER_SETUP, **names) == 0, 20, "the owner's setup")
        return worker

    def _start_client(self, role: str) -> None:
        self._numbers += 1
        name = f"{role}{self._numbers}"
        command = [*self._prefix(role), sys.executable, "-m", "tests.matrix.client", str(self.folder), name]
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115
        with log:
            client = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment()
            )
        settings = {"number": self._numbers, "host": self._host(role), "metadata": self.metadata.address,
                    "master": self.master.address, "registered": self._numbers % 2 == 0}  # fmt: skip
        self.clients[role] = client
        self.notes.append(self.folder / f"{name}.notes")
        self.tell(role, settings)
        assert self.hear(role, 30) == "ready"

    def _end(self, process: subprocess.Popen[Any]) -> None:
        if process.poll() is None:
            self.cast.leaves(process.pid)
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _end_client(self, role: str) -> None:
        client = self.clients[role]
        if client.poll() is None:
            self.cast.leaves(client.pid)
            client.send_signal(signal.SIGCONT)
            client.stdin.close()
            try:
                client.wait(10)
            except subprocess.TimeoutExpired:
                client.kill()
                client.wait()
        client.stdout.close()

    def processes(self) -> dict[str, int]:
        """{role: pid} of all that live."""
        private = children(self.owner.pid)
        return {
            MASTER: self.master.process.pid,
            SERVER: self.server.pid,
            "owner": self.owner.pid,
            METADATA: self.metadata.process.pid,
            **({PRIVATE: private[0]} if private else {}),
            **{role: client.pid for role, client in self.clients.items()},
        }

    def _enroll(self) -> None:
        for role, pid in self.processes().items():
            self.cast.add(role, pid)

    # -- clients

    def tell(self, role: str, what: dict[str, Any]) -> None:
        print(json.dumps(what), file=self.clients[role].stdin, flush=True)

    def hear(self, role: str, limit: float) -> Any:
        """The client's next line; None if it has ended, or says nothing in `limit` seconds."""
        ready, _, _ = select.select([self.clients[role].stdout], [], [], limit)
        line = self.clients[role].stdout.readline() if ready else ""
        return json.loads(line) if line else None

    def segments(self) -> list[str]:
        return [f"{self._host(SERVER)}:{self._server_port}", self.owner("result = store.get_hostname()")]

    # -- whether it is well

    def whole(self) -> bool:
        """Both segments are mounted, and values can be put, got and removed."""
        if len(self.master.get("/get_all_segments").split()) != 2:
            return False
        if self.disk is not None and self.master.metric("mooncake_disk_tiers") != 1:
            return False
        key, data = f"probe-{time.monotonic()}", b"probe" * 1000
        code = self.probe.put(key, data)
        good = code == 0 and self.probe.get(key) == data
        removed = self.probe.remove(key, force=True)
        return good and removed == 0

    def plant(self) -> None:
        """Put values that may not be evicted, some into each segment."""
        for place, segment in zip((SERVER, PRIVATE), self.segments(), strict=True):
            pinned = ReplicateConfig()
            pinned.with_hard_pin = True
            pinned.preferred_segment = segment
            for _ in range(PLANTED):
                self._plants += 1
                key = f"planted{self._plants}"
                if self.probe.put(key, value(key, 1, PLANT), pinned) == 0:
                    self._planted[key] = place

    def harvest(self, died: str, limit: float) -> list[str]:
        """Which of them are wrong, or lost though their server is not the one that `died`; they are removed."""
        found = []
        end = time.monotonic() + limit
        for key, place in self._planted.items():
            while not (got := self.probe.get(key)) and place != died and time.monotonic() < end:
                time.sleep(0.05)
            if not got and place != died:
                found.append(f"{key} was acknowledged, and is lost though the {place} lives")
            elif got and (why := version_of(key, got)[1]):
                found.append(f"{key}: {why}")
        self.probe.batch_remove(list(self._planted), force=True)
        self._planted = {}
        return found

    # -- what happens to it

    def pid(self, victim: str) -> int:
        return self.processes()[METADATA if victim == ETCD else victim]

    def stop(self, victim: str) -> None:
        stop(self.pid(victim))

    def resume(self, victim: str) -> None:
        os.kill(self.pid(victim), signal.SIGCONT)

    def kill(self, victim: str) -> None:
        self.cast.kill(self.pid(victim))
        {
            MASTER: lambda: self.master.process.wait(),
            SERVER: lambda: self.server.wait(),
            PRIVATE: lambda: None,
            METADATA: lambda: self.metadata.process.wait(),
            ETCD: lambda: self.metadata.process.wait(),
            WRITER: lambda: self.clients[WRITER].wait(),
            READER: lambda: self.clients[READER].wait(),
        }[victim]()

    def end(self, victim: str) -> None:
        """As its operator would."""
        self.cast.leaves(self.pid(victim))
        if victim == PRIVATE:
            self.owner.close()
        elif victim in (WRITER, READER):
            self._end(self.clients[victim])
        elif victim == SERVER:
            self._end(self.server)
        else:
            self._end(self.master.process if victim == MASTER else self.metadata.process)

    def start(self, victim: str, elsewhere: bool = False) -> None:
        """Again, after it has ended."""
        if elsewhere and self.hosts is None:
            self._addresses[victim] = "127.0.0.2" if self._host(victim) == "127.0.0.1" else "127.0.0.1"
        if victim == MASTER:
            self.master.start()
        elif victim == SERVER:
            self.server = self._start_server(0 if elsewhere else self._server_port)
        elif victim == PRIVATE:
            self.cast.leaves(self.owner.pid)
            self.owner.close()
            self.owner = self._start_owner()
        elif victim in (METADATA, ETCD):
            self.metadata.start()
        else:
            self.clients[victim].stdin.close()
            self.clients[victim].stdout.close()
            self._start_client(victim)
        self._enroll()

    def cut_off(self, victim: str) -> AbstractContextManager[None]:
        return self.hosts.cut_off(self._place(victim))

    def slowed(self, victim: str) -> AbstractContextManager[None]:
        return self.hosts.slowed(self._place(victim), SLOW)

    def _place(self, victim: str) -> int:
        return PLACES.index(METADATA if victim == ETCD else victim)

    def fill_disk(self) -> None:
        """All that is free."""
        assert self.disk is not None
        self._filled = self.disk / "somebody else's"
        with open(self._filled, "wb") as f:
            size = 0
            for step in (MIB, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        os.posix_fallocate(f.fileno(), size, step)
                        size += step

    def free_disk(self) -> None:
        assert self._filled is not None
        self._filled.unlink()

    def fill_memory(self) -> None:
        """With values that may not be evicted, until no more goes in."""
        pinned = ReplicateConfig()
        pinned.with_hard_pin = True
        for size in (MIB, 64 << 10):
            failures = 0
            while failures < 3:
                key = f"pinned{len(self._pinned)}"
                if self.probe.put(key, bytes(size), pinned) == 0:
                    self._pinned.append(key)
                else:
                    failures += 1

    def free_memory(self) -> None:
        codes = self.probe.batch_remove(self._pinned, force=True)
        assert all(code == 0 for code in codes), codes
        self._pinned = []
