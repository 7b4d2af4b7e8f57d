"""Which host this process runs on."""

import contextlib
import os


def host_id() -> str:
    """The same text on the same host: boot id and network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    with contextlib.suppress(OSError):
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    return boot


def pid_namespace() -> str:
    """The same text where the same pids mean the same processes: boot id and pid namespace."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    with contextlib.suppress(OSError):
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return boot
