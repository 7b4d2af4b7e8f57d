"""Which of the ports that a pool uses are free on this host, and who has those that are not."""

from collections.abc import Sequence

from mooncake.config_text import environment_whole
from mooncake.doctor import processes
from mooncake.doctor.findings import Finding, fail, ok, unknown, warn

AREA = "ports of this host"

_FEW = 16  # data ports; each engine and segment server takes one


def look_at_ports(ports: Sequence[tuple[int, str]]) -> list[Finding]:
    """`ports`: numbers, and what each is for."""
    return [_port(port, use) for port, use in ports] + [_data_ports()]


def _port(port: int, use: str) -> Finding:
    subject = f"{port} ({use})"
    pids = processes.listeners(port)
    if not pids:
        return ok(AREA, subject, "free")
    if pids == [0]:
        return unknown(AREA, subject, "taken, by a process that cannot be seen from here (root sees it)")
    parts = []
    stopped = False
    for pid in pids:
        found = processes.process(pid)
        stopped = stopped or bool(found and found.stopped)
        parts.append(f"pid {pid} ({found.name if found else 'gone'}){' which is stopped' if stopped else ''}")
    text = f"taken by {', '.join(parts)}"
    return warn(AREA, subject, text, f"kill -CONT {pids[0]} lets it go on.") if stopped else ok(AREA, subject, text)


def _data_ports() -> Finding:
    """Where segment servers and transfer engines look for one."""
    low = environment_whole("MC_MIN_RPC_PORT", 15000)
    high = environment_whole("MC_MAX_RPC_PORT", 17000)
    taken = len({port for port, _ in processes.all_listening() if low <= port <= high})
    free = high - low + 1 - taken
    subject, text = f"{low}-{high} (data)", f"{taken} taken, {free} free"
    advice = "Widen the range with MC_MIN_RPC_PORT and MC_MAX_RPC_PORT."
    if free <= 0:
        return fail(AREA, subject, text, advice)
    return warn(AREA, subject, text, advice) if free < _FEW else ok(AREA, subject, text)
