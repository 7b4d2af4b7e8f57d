"""Whether this host lets a pool have the memory that it wants: shared, locked, in huge pages."""

import mmap
import os
import resource
from pathlib import Path

from mooncake.doctor.findings import Finding, fail, ok, unknown, warn
from mooncake.transfer.memory import available_memory

AREA = "memory"

_GIB = 1 << 30
_MIB = 1 << 20
_SHM = "/dev/shm"  # noqa: S108 -- its size is looked at, nothing is put there
_SMALL_SHM = 1 << 30  # bytes of /dev/shm below which vLLM's own queues may run out


def look_at_memory(segment_size: int) -> list[Finding]:
    """`segment_size`: bytes that the pool's configuration wants to give; 0 if that is not known."""
    available = available_memory()
    text = f"{available / _GIB:.1f} GiB available"
    if segment_size > available:
        advice = "Give a smaller global_segment_size, or end other programs."
        found = [fail(AREA, "memory", f"{text}, but global_segment_size is {segment_size / _GIB:.1f} GiB", advice)]
    else:
        found = [ok(AREA, "memory", text)]
    return [*found, _cgroup(), _memfd(), _shm(), _locked(), _huge_pages()]


def _cgroup() -> Finding:
    """The limit of the nearest cgroup that has one."""
    subject = "cgroup limit"
    folder = _own_cgroup()
    if folder is None:
        return unknown(AREA, subject, "cgroup v2 is not mounted at /sys/fs/cgroup")
    for place in (folder, *folder.parents):
        try:
            limit = (place / "memory.max").read_text().strip()
            used = int((place / "memory.current").read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            text = f"{int(limit) / _GIB:.1f} GiB, {used / _GIB:.1f} used (shared memory of a pool counts)"
            nearly = used > 0.9 * int(limit)
            advice = "Raise the container's memory limit, or give less to the pool." if nearly else ""
            return (warn if nearly else ok)(AREA, subject, text, *([advice] if nearly else []))
    return ok(AREA, subject, "none")


def _own_cgroup() -> Path | None:
    root = Path("/sys/fs/cgroup")
    if not (root / "cgroup.controllers").exists():
        return None
    try:
        line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return root
    own = root / line[3:].lstrip("/")
    return own if own.exists() else root


def _memfd() -> Finding:
    """A sealed memfd that is mapped and written, as a segment's memory is."""
    subject = "memfd"
    try:
        fd = os.memfd_create("mooncake-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return fail(AREA, subject, f"memfd_create is refused: {error.strerror}", "Allow it in the seccomp profile.")
    try:
        os.ftruncate(fd, 2 * _MIB)
        with mmap.mmap(fd, 2 * _MIB) as room:
            room[:4] = b"mine"
        return ok(AREA, subject, "can be made and mapped; a segment's memory needs no room in /dev/shm")
    except OSError as error:
        return fail(AREA, subject, f"cannot be mapped: {error.strerror}", "Look at the container's limits.")
    finally:
        os.close(fd)


def _shm() -> Finding:
    try:
        status = os.statvfs(_SHM)
    except OSError as error:
        return warn(AREA, _SHM, f"is not there: {error.strerror}", "Mount a tmpfs there: vLLM needs it.")
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{free / _GIB:.2f} of {size / _GIB:.2f} GiB free (vLLM's workers talk through it)"
    if free < _SMALL_SHM:
        return warn(AREA, _SHM, text, "Give the container a larger one: --shm-size=8g, or --ipc=host.")
    return ok(AREA, _SHM, text)


def _locked() -> Finding:
    """Only RDMA and pinned memory need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return ok(AREA, "memlock", "unlimited" if soft == resource.RLIM_INFINITY else "root is not limited")
    text = f"{soft // 1024} KiB may be locked (at most {hard // 1024 if hard >= 0 else 'unlimited'}); tcp needs none"
    return warn(AREA, "memlock", text, "For RDMA or pinned memory: ulimit -l unlimited, or --ulimit memlock=-1.")


def _huge_pages() -> Finding:
    """Shared memory in huge pages copies about a tenth faster."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
        setting = text.partition("[")[2].partition("]")[0]
    except OSError:
        return unknown(AREA, "huge pages", "this kernel has no transparent huge pages for shared memory")
    if setting in ("never", "deny"):
        advice = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (large copies get a tenth faster)"
        version = tuple(int(part) for part in os.uname().release.split(".")[:2] if part.isdecimal())
        if version >= (6, 1) and setting == "never":
            return ok(AREA, "huge pages", "for shared memory: never, but this kernel makes them when asked to")
        return warn(AREA, "huge pages", f"for shared memory: {setting}", advice)
    return ok(AREA, "huge pages", f"for shared memory: {setting}")
