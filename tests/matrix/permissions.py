"""What this machine permits; each function says why not, or ""."""

import subprocess
from pathlib import Path

from tests.hosts import Hosts


def why_no_hosts() -> str:
    """Network namespaces with links that can be slowed."""
    try:
        hosts = Hosts(1, reachable=True)
        try:
            with hosts.slowed(0, 1 << 20):
                pass
        finally:
            hosts.close()
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", b"") or b""
        return f"network namespaces cannot be made here: {detail.decode().strip() or error}"
    return ""


def mount_small(folder: Path, size: int) -> str:
    """Make `folder` a file system of its own with `size` bytes; `unmount` ends it."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False, text=True)
    except OSError as error:
        return f"no small file system can be mounted here: {error}"
    return f"no small file system can be mounted here: {done.stderr.strip()}" if done.returncode else ""


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)
