"""Where a tier lives on disk, and how it is set up.

The directory that a user names may serve several segment servers of the host (one an engine process): each takes the
first `tier-<n>` in it that no living server holds, with all that an earlier holder left there.  `tier.json` names the
tier, by a number that stays the same as long as its values do.
"""

import fcntl
import json
import logging
import os
import secrets
import time
from typing import NamedTuple

from mooncake.errors import ConfigError
from mooncake.rpc.disk_messages import DiskSettings
from mooncake.segment.disk.files import takes_direct

logger = logging.getLogger("mooncake.segment")

LAYOUT = 1
_MOST = 64
_SHARE = 0.9  # of the file system's free bytes, without a quota


class Home(NamedTuple):
    """A tier's own directory, held as long as `lock` is open."""

    path: str
    number: int
    lock: int
    direct: bool


def settle(settings: DiskSettings, patience: float = 3.0) -> Home:
    """Take a tier directory.  A former server may need a moment to let go of its own.  Raises OSError, ConfigError."""
    give_up = time.monotonic() + patience
    while True:
        patient = time.monotonic() < give_up
        for n in range(_MOST):
            path = os.path.join(settings.path, f"tier-{n}")
            if n and patient and not os.path.isdir(path):
                break  # all that exist are held: perhaps by servers that are just ending
            os.makedirs(path, mode=0o700, exist_ok=True)
            lock = _lock(path)
            if lock is not None:
                try:
                    return _enter(path, lock)
                except BaseException:
                    os.close(lock)
                    raise
        else:
            raise ConfigError(f"{_MOST} segment servers keep values in {settings.path}; name another directory")
        time.sleep(0.05)


def _lock(path: str) -> int | None:
    fd = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _enter(path: str, lock: int) -> Home:
    name = os.path.join(path, "tier.json")
    try:
        with open(name, encoding="utf-8") as f:
            found = json.load(f)
        layout, number = int(found["layout"]), int(found["tier"])
    except FileNotFoundError:
        layout, number = LAYOUT, secrets.randbits(62) + 1
        with open(name + ".new", "w", encoding="utf-8") as f:
            json.dump({"layout": layout, "tier": number}, f)
        os.replace(name + ".new", name)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{name} is damaged; delete the directory {path} to begin anew") from None
    if layout != LAYOUT:
        raise ConfigError(f"{path} has layout {layout}, expected {LAYOUT}; delete it, or use the version that made it")
    direct = takes_direct(path)
    if not direct:
        logger.warning("the file system of %s has no direct I/O: values go through the page cache", path)
    return Home(path, number, lock, direct)


def quota_of(settings: DiskSettings, master_quota: int, path: str, used: int) -> int:
    """Bytes that the tier may use: the least of what master and settings say, else a share of what is free."""
    limits = [limit for limit in (settings.quota, master_quota) if limit > 0]
    if limits:
        return min(limits)
    found = os.statvfs(path)
    return int((found.f_bavail * found.f_frsize + used) * _SHARE)
