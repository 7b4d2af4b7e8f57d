"""Whether the kernel lets engines of this host copy straight from each other's memory."""

import errno
import subprocess
import sys
from pathlib import Path

from mooncake.doctor.findings import Finding, ok, unknown, warn

AREA = "copies between processes"

_PROBE = Path(__file__).with_name("copy_probe.py")
_LIMIT = 4.0  # seconds of one half


def look_at_copies() -> list[Finding]:
    """process_vm_readv between two children that are no relations: as things are, and permitted by the other side."""
    subject = "process_vm_readv"
    try:
        plain, permitted = _try("plain"), _try("permit")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [unknown(AREA, subject, f"could not be tried: {type(error).__name__}: {error}")]
    scope = _ptrace_scope()
    if plain == 0:
        return [ok(AREA, subject, f"works ({scope}): engines of one host copy straight")]
    if permitted == 0:
        return [ok(AREA, subject, f"works where the other side permits it, which engines do ({scope})")]
    name = errno.errorcode.get(permitted, str(permitted))
    if permitted == errno.ENOSYS:
        text = f"is refused by a seccomp filter ({name}): engines of one host use tcp between them"
        return [warn(AREA, subject, text, "Run the container with a seccomp profile that allows it.")]
    advice = "Allow it: --cap-add=SYS_PTRACE for containers, or sysctl kernel.yama.ptrace_scope=1."
    return [warn(AREA, subject, f"is refused ({name}, {scope}): engines of one host use tcp between them", advice)]


def _try(how: str) -> int:
    """0, or an errno."""
    python = [sys.executable, "-I", "-S", str(_PROBE)]
    with subprocess.Popen([*python, "hold", how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout
            pid, address = holder.stdout.readline().split()
            read = subprocess.run(
                [*python, "read", pid, address], capture_output=True, text=True, timeout=_LIMIT, check=True
            )
        finally:
            holder.kill()
    return int(read.stdout)


def _ptrace_scope() -> str:
    try:
        return f"ptrace_scope {Path('/proc/sys/kernel/yama/ptrace_scope').read_text().strip()}"
    except OSError:
        return "no Yama"
