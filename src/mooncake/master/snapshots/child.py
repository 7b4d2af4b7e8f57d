"""The process that writes one snapshot, or finds the newest whole one: `python -m mooncake.master.snapshots.child`.

A process of its own, so that neither a slow disk nor S3's library is ever in the master's way, and so that it can be
killed if it hangs.  Its standard input is a line of JSON (a `Job`), and what is to be written; its standard output a
line of JSON (an `Outcome`), and what was read.  A snapshot whose end does not come (the master was killed) is not kept.
"""

from __future__ import annotations

import contextlib
import sys

import msgspec

from mooncake.errors import ConfigError
from mooncake.master.snapshots.file import DamagedError, check
from mooncake.master.snapshots.settings import SnapshotSettings
from mooncake.master.snapshots.stores import SUFFIX, Folder, Store, keep_newest


class Job(msgspec.Struct):
    """`write`: under this name; "": read.  `limit_s`: what a wait for S3 may take when reading."""

    settings: SnapshotSettings
    write: str = ""
    limit_s: float | None = None


class Outcome(msgspec.Struct):
    """`name`: of the snapshot that was written or read; `in_backup`: only to the backup folder.  `error`: what did not
    work; `damaged`: what was found and not believed."""

    name: str = ""
    error: str = ""
    in_backup: bool = False
    damaged: list[str] = []
    size: int = 0


def main() -> None:
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    job = msgspec.json.decode(stdin.readline(), type=Job)
    outcome = Outcome()
    raw = b""
    try:
        if job.write:
            _write(job, stdin.read(), outcome)
        else:
            raw = _read(job, outcome)
    except (OSError, DamagedError, ConfigError) as error:
        outcome.error = str(error)
    with contextlib.suppress(BrokenPipeError):
        stdout.write(msgspec.json.encode(outcome) + b"\n" + raw)
        stdout.flush()


def _store(job: Job) -> Store:
    settings = job.settings
    store: Store = Folder(settings.folder, settings.cluster)
    if settings.s3 is not None:
        from mooncake.master.snapshots.s3 import Bucket

        store = Bucket(settings.s3, settings.cluster, job.limit_s)
    if settings.redis:
        from mooncake.master.snapshots.catalog import Listed

        store = Listed(store, settings.redis, settings.cluster)
    return store


def _backup(settings: SnapshotSettings) -> Folder | None:
    return Folder(settings.backup_folder, settings.cluster) if settings.backup_folder else None


def _write(job: Job, raw: bytes, outcome: Outcome) -> None:
    check(raw)
    outcome.size = len(raw)
    backup = _backup(job.settings)
    try:
        store = _store(job)
        store.write(job.write, raw)
        outcome.name = job.write
    except OSError as error:
        if backup is None:
            raise
        outcome.error = str(error)
        backup.write(job.write, raw)
        outcome.name, outcome.in_backup = job.write, True
        store = backup
    try:
        keep_newest(store, job.settings.keep, job.write)
    except OSError as error:
        outcome.error = outcome.error or f"older snapshots stay ({error})"


def _read(job: Job, outcome: Outcome) -> bytes:
    """The newest whole snapshot; empty if there is none."""
    stores: list[Store] = []
    found: list[tuple[str, Store]] = []
    if (backup := _backup(job.settings)) is not None:
        stores.append(backup)
    try:
        stores.append(_store(job))
    except OSError as error:
        outcome.error = str(error)
    for store in stores:
        try:
            found += [(name, store) for name in store.names() if name.endswith(SUFFIX)]
        except OSError as error:
            outcome.error = str(error)
            if store.inner is not None:
                stores.append(store.inner)
    for name, store in sorted(found, key=lambda one: one[0], reverse=True):
        try:
            raw = store.read(name)
            check(raw)
        except DamagedError as error:
            outcome.damaged.append(f"{name}: {error}")
            with contextlib.suppress(OSError):
                store.set_aside(name)
        except OSError as error:
            outcome.error = str(error)
        else:
            outcome.name, outcome.size = name, len(raw)
            return raw
    return b""


if __name__ == "__main__":
    main()
