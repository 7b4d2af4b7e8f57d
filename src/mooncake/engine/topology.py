"""Which network devices lie near which memory, as JSON text: location → [preferred devices, other devices]."""

import json
import os
import re

_NODES = "/sys/devices/system/node"
_DEVICES = "/sys/class/infiniband"
_NODE = re.compile(r"node(\d+)")


def local_topology(device_names: str = "", custom_path: str = "") -> str:
    """Of this host.  `device_names`: comma-separated, only these count ("": all); `custom_path`: a file that says it
    instead.  Raises OSError if that cannot be read."""
    if custom_path:
        with open(custom_path) as f:
            return f.read()
    wanted = {name.strip() for name in device_names.split(",") if name.strip()}
    devices = {name: _node_of(name) for name in _listed(_DEVICES) if not wanted or name in wanted}
    nodes = sorted(int(match[1]) for name in _listed(_NODES) if (match := _NODE.fullmatch(name))) or [0]
    return json.dumps(
        {
            f"cpu:{node}": [
                sorted(name for name, near in devices.items() if near in (node, -1)),
                sorted(name for name, near in devices.items() if near not in (node, -1)),
            ]
            for node in nodes
        }
    )


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _node_of(device: str) -> int:
    """The NUMA node of a device, -1 unknown."""
    try:
        with open(f"{_DEVICES}/{device}/device/numa_node") as f:
            return int(f.read())
    except (OSError, ValueError):
        return -1
