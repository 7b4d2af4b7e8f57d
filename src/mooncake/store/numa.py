"""Binding this thread's memory and CPU to a NUMA node, by system call: no libnuma is needed."""

import contextlib
import ctypes
import os
import platform

_MPOL_PREFERRED = 1
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}.get(platform.machine())


def bind_to_numa_node(node: int) -> None:
    """Run on the CPUs of NUMA node `node` and prefer its memory.  A node that does not exist is ignored."""
    try:
        with open(f"/sys/devices/system/node/node{node}/cpulist") as f:
            cpus = _cpus(f.read().strip())
    except OSError:
        return
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)
    if _SET_MEMPOLICY is not None:
        mask = ctypes.c_ulong(1 << node)
        ctypes.CDLL(None).syscall(_SET_MEMPOLICY, _MPOL_PREFERRED, ctypes.byref(mask), ctypes.sizeof(mask) * 8)


def _cpus(text: str) -> set[int]:
    cpus: set[int] = set()
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
