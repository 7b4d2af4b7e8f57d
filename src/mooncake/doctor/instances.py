"""What each instance answered, by whom its settings are known, and whether it can work with this package."""

from collections.abc import Sequence

from mooncake.doctor.findings import Finding, fail, ok, warn
from mooncake.doctor.instance import Instance

AREA = "instances"


def look_at_instances(instances: Sequence[Instance]) -> list[Finding]:
    found: list[Finding] = []
    for one in instances:
        if not one.answers:
            reason = one.missing.get("/server_info", "no answer")
            advice = "Start it, or correct the URL (scheme, host and port)."
            found.append(fail(AREA, one.name, f"the instance does not answer: {reason}", advice))
            continue
        found.append(_sources(one))
        if one.cpp_library:
            text = f"it has loaded the C++ wheel ({one.cpp_library}), which cannot talk to this package's master"
            found.append(fail(AREA, one.name, text, "Install mooncake-py in its environment, and nothing else."))
        policy = (one.store or {}).get("kv_load_failure_policy")
        if one.store is not None and not one.has_own_store and policy != "recompute":
            advice = 'Add "kv_load_failure_policy": "recompute" to its --kv-transfer-config.'
            text = "a block that is lost between look-up and load fails the request (kv_load_failure_policy)"
            found.append(warn(AREA, one.name, text, advice))
    return found + _lookup_ports(instances)


def _sources(one: Instance) -> Finding:
    told = list(dict.fromkeys(one.told_by.values()))
    version = one.known.get("vLLM")
    text = f"vLLM {version or '(release unknown)'}; told by {', '.join(told) or 'nothing'}"
    if one.missing:
        text += "; not available: " + "; ".join(f"{source} ({reason})" for source, reason in one.missing.items())
    if not told:
        return warn(AREA, one.name, text, "Give the URL of vLLM's API server, not of a proxy.")
    return ok(AREA, one.name, text)


def _lookup_ports(instances: Sequence[Instance]) -> list[Finding]:
    """Two instances of a host with one lookup_rpc_port are wired to each other, and hang when one stops."""
    by_port: dict[str, list[str]] = {}
    for one in instances:
        extra = (one.store or {}).get("kv_connector_extra_config")
        if one.pid and one.store is not None and not one.has_own_store:
            port = str((extra if isinstance(extra, dict) else {}).get("lookup_rpc_port", 0))
            by_port.setdefault(port, []).append(one.name)
    return [
        fail(
            AREA,
            "lookup_rpc_port",
            f"{' and '.join(names)} share the number {port} on this host: one's scheduler asks the other's worker",
            "Give each instance of a host another lookup_rpc_port in kv_connector_extra_config.",
        )
        for port, names in by_port.items()
        if len(names) > 1
    ]
