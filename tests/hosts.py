"""Hosts that are network namespaces on one bridge; links are cut and slowed.  Needs root; it goes with `close`."""

import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


def _tag(pid: int) -> str:
    return f"m{pid % 100000}n"


def remove_hosts_of(pid: int) -> None:
    """Those that a process made which has been killed."""
    for kind, delete in (("netns", ["netns", "del"]), ("link", ["link", "del"])):
        shown = subprocess.run(["ip", "-j", kind, "show"], capture_output=True, check=False).stdout
        for one in json.loads(shown or "[]"):
            name = one.get("name") or one.get("ifname")
            if name.startswith(_tag(pid)):
                subprocess.run(["ip", *delete, name], check=False, capture_output=True)


class Hosts:
    """`count` hosts with an address each; this process reaches them, and they it, if `reachable`."""

    _made = itertools.count()  # a deleted namespace's links go a little later: no name twice

    def __init__(self, count: int, reachable: bool = False) -> None:
        number = next(self._made)
        self._tag = f"{_tag(os.getpid())}{number}"
        self.names = [f"{self._tag}h{i}" for i in range(count)]
        net = f"10.231.{(os.getpid() * 7 + number) % 250}" if reachable else "10.231.7"  # nobody else's of this host
        self.addresses = [f"{net}.{i + 1}" for i in range(count)]
        self.outside = f"{net}.254" if reachable else ""
        self._bridge = f"{self._tag}b"
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        # An address of its own: else it has that of one of its links, another one when that is cut, and nobody is told.
        own = [f"{byte:02x}" for byte in (2, 0, *os.getpid().to_bytes(4, "big"))]
        self._run("ip", "link", "add", self._bridge, "address", ":".join(own), "type", "bridge")
        if self.outside:
            self._run("ip", "addr", "add", f"{self.outside}/24", "dev", self._bridge)
        self._run("ip", "link", "set", self._bridge, "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            self._run("ip", "netns", "add", name)
            self._run("ip", "link", "add", self._link(i), "type", "veth", "peer", "name", "eth0", "netns", name)
            self._run("ip", "link", "set", self._link(i), "master", self._bridge, "up")
            inside = ("ip", "-n", name)
            self._run(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
            self._run(*inside, "link", "set", "eth0", "up")
            self._run(*inside, "link", "set", "lo", "up")

    def _link(self, i: int) -> str:
        return f"{self._tag}v{i}"

    def inside(self, i: int) -> list[str]:
        """What to put before a command that is to run in host `i`."""
        return ["ip", "netns", "exec", self.names[i]]

    @contextmanager
    def cut_off(self, i: int) -> Iterator[None]:
        """Nothing comes or goes, and nobody is told."""
        self._run("ip", "link", "set", self._link(i), "nomaster")
        try:
            yield
        finally:
            self._run("ip", "link", "set", self._link(i), "master", self._bridge, "up")

    @contextmanager
    def slowed(self, i: int, bytes_a_second: int) -> Iterator[None]:
        """Either way."""
        outer, inner = ["tc"], ["tc", "-n", self.names[i]]
        rate = ["root", "tbf", "rate", f"{bytes_a_second * 8}bit", "burst", "64kb", "latency", "200ms"]
        self._run(*outer, "qdisc", "add", "dev", self._link(i), *rate)
        self._run(*inner, "qdisc", "add", "dev", "eth0", *rate)
        try:
            yield
        finally:
            self._run(*outer, "qdisc", "del", "dev", self._link(i), "root")
            self._run(*inner, "qdisc", "del", "dev", "eth0", "root")

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True)

    def _run(self, *argv: str) -> None:
        subprocess.run(argv, check=True, capture_output=True)
