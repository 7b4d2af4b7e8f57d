"""The whole examination: which checks there are for what the user named, and their findings in order."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mooncake.doctor import copies, devices, hashing, instances, memory, pool, ports, probe, proxies, software
from mooncake.doctor.checks import Check, run_all
from mooncake.doctor.findings import Finding
from mooncake.doctor.instance import Instance, learn
from mooncake.doctor.pool import PoolPlace
from mooncake.rpc.place import parse_address

_HOST_LIMIT = 12.0  # seconds of one check of the host
_QUESTIONS = 8  # that one check asks one after the other, at most
_USUAL_PORTS = ((50051, "master"), (9003, "metrics"), (8998, "bootstrap"))


@dataclass(frozen=True)
class Plan:
    """What to look at.  `limit`: seconds of one question over the network."""

    place: PoolPlace
    protocol: str
    segment_size: int  # bytes
    instances: tuple[str, ...]  # URLs
    proxies: tuple[str, ...]
    ports: tuple[int, ...]
    limit: float
    probe: bool = False  # whether instances are asked for an answer


def examine(plan: Plan) -> list[Finding]:
    """Everything; ends in bounded time whatever hangs."""
    asked = plan.limit * _QUESTIONS
    checks = [
        Check(software.AREA, "installation", software.look_at_software, _HOST_LIMIT),
        Check(memory.AREA, "memory", lambda: memory.look_at_memory(plan.segment_size), _HOST_LIMIT),
        Check(copies.AREA, "process_vm_readv", copies.look_at_copies, _HOST_LIMIT),
        Check(
            devices.NETWORK,
            "network",
            lambda: devices.look_at_network(plan.place.master, plan.protocol),
            _HOST_LIMIT,
        ),
        Check(devices.GPUS, "GPUs", devices.look_at_gpus, _HOST_LIMIT),
        Check(ports.AREA, "ports", lambda: ports.look_at_ports(_ports(plan)), _HOST_LIMIT),
    ]
    if plan.place.master:
        checks.append(Check(pool.AREA, "master", lambda: pool.look_at_master(plan.place), asked))
        checks.append(Check(pool.AREA, "contents", lambda: pool.look_at_state(plan.place), asked))
    if plan.place.metadata:
        checks.append(Check(pool.AREA, "metadata service", lambda: pool.look_at_metadata(plan.place), asked))
    if plan.instances or plan.proxies:
        patience = 2 * asked + (probe.ANSWER_LIMIT * (len(plan.instances) + _QUESTIONS) if plan.probe else 0)
        checks.append(Check(instances.AREA, "all", lambda: _look_at_instances(plan), patience))
    return run_all(checks)


def _look_at_instances(plan: Plan) -> list[Finding]:
    """Those that were named and those that proxies have."""
    found: list[Finding] = []
    urls = [url.rstrip("/") for url in plan.instances]
    for proxy in plan.proxies:
        findings, theirs = proxies.look_at_proxy(proxy, plan.limit)
        found += findings
        urls += theirs
    learned = _learn_all(list(dict.fromkeys(urls)), plan.limit)
    found += [*instances.look_at_instances(learned), *hashing.compare(learned)]
    return found + probe.probe(learned, plan.limit) if plan.probe else found


def _learn_all(urls: Sequence[str], limit: float) -> list[Instance]:
    if not urls:
        return []
    with ThreadPoolExecutor(len(urls), "doctor-instance") as threads:
        return list(threads.map(lambda url: learn(url, limit), urls))


def _ports(plan: Plan) -> list[tuple[int, str]]:
    if plan.ports:
        return [(port, "asked for") for port in plan.ports]
    own = dict(_USUAL_PORTS)
    try:
        own = {parse_address(plan.place.master)[1]: "master", plan.place.metrics_port: "metrics", 8998: "bootstrap"}
    except ValueError:
        pass
    return list(own.items())
