"""Has a snapshot written at each interval, beside the serving loop.

The loop collects a slice at a time and hands the bytes to a thread, which hands them to the child (see `child`), which
does all that may block.  One at a time; one that takes too long is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import time

import msgspec

from mooncake.master.directory import Directory
from mooncake.master.snapshots.blocks import encode
from mooncake.master.snapshots.child import Job, Outcome
from mooncake.master.snapshots.contents import collect
from mooncake.master.snapshots.file import Writer
from mooncake.master.snapshots.settings import SnapshotSettings
from mooncake.master.snapshots.stores import SUFFIX

log = logging.getLogger("mooncake.master")

_CHUNK = 1 << 18  # bytes handed to the child at a time


class Keeper:
    """Writes the snapshots of one directory; `run` until cancelled."""

    def __init__(self, directory: Directory, settings: SnapshotSettings) -> None:
        self._directory = directory
        self._settings = settings
        self._counters = directory.counters
        self._number = 0
        self._failing = False
        self._one = asyncio.Lock()

    async def run(self) -> None:
        """One at each interval, for ever."""
        while True:
            await asyncio.sleep(self._settings.interval_s)
            with contextlib.suppress(OSError):
                await self.take()

    async def take(self) -> str:
        """Write one snapshot now, or when the one under way is done; its name.  Raises OSError, which is counted and
        said in the log the first time."""
        async with self._one:
            began = time.monotonic()
            try:
                outcome = await self._attempt()
                if not outcome.name:
                    raise OSError(outcome.error)
                if outcome.in_backup:
                    raise OSError(f"{outcome.error}; it is in {self._settings.backup_folder}")
            except Exception as error:
                self._counters["mooncake_snapshots_failed_total"] += 1
                if not self._failing:
                    log.warning("a snapshot could not be written: %s; the master goes on, and tries again", error)
                self._failing = True
                raise error if isinstance(error, OSError) else OSError(repr(error)) from error
            self._written(outcome, time.monotonic() - began)
            return outcome.name

    async def _attempt(self) -> Outcome:
        loop = asyncio.get_running_loop()
        self._number += 1
        # Terms grow from master to master, so the order of the names is that of time.
        name = f"{self._directory.term:014d}-{self._number:06d}{SUFFIX}"
        child = await loop.run_in_executor(None, start_child, Job(self._settings, name))
        work = asyncio.ensure_future(self._feed(child))
        try:
            return await asyncio.wait_for(asyncio.shield(work), self._settings.limit_s)
        except TimeoutError:
            raise OSError(f"it was not written within {self._settings.limit_s:g} s") from None
        except (BrokenPipeError, msgspec.MsgspecError) as error:
            raise OSError(f"its process ended early ({error})") from None
        finally:
            child.kill()
            work.cancel()
            await loop.run_in_executor(None, _reap, child)

    async def _feed(self, child: subprocess.Popen[bytes]) -> Outcome:
        """Give the child everything; what it says."""
        assert child.stdin is not None
        loop = asyncio.get_running_loop()
        writer, chunk = Writer(), bytearray()
        for block in collect(self._directory, self._settings.cluster):
            chunk += writer.block(encode(block))
            if len(chunk) >= _CHUNK:
                await loop.run_in_executor(None, child.stdin.write, bytes(chunk))
                chunk.clear()
            else:
                await asyncio.sleep(0)
        chunk += writer.end()
        said, _ = await loop.run_in_executor(None, child.communicate, bytes(chunk))
        return msgspec.json.decode(said.partition(b"\n")[0], type=Outcome)

    def _written(self, outcome: Outcome, seconds: float) -> None:
        counters = self._counters
        counters["mooncake_snapshots_written_total"] += 1
        counters.snapshots = {
            "mooncake_snapshot_time_seconds": int(time.time()),
            "mooncake_snapshot_bytes": outcome.size,
            "mooncake_snapshot_duration_ms": round(seconds * 1000),
        }
        if self._failing:
            log.info("snapshots are written again")
        self._failing = False
        log.debug("snapshot %s of %d bytes is written", outcome.name, outcome.size)
        if outcome.error:
            log.warning("snapshot %s is written, but %s", outcome.name, outcome.error)


def start_child(job: Job) -> subprocess.Popen[bytes]:
    """The process, with its job.  Not forked from the loop's thread: that takes a while when there are many objects."""
    child = subprocess.Popen(
        [sys.executable, "-m", "mooncake.master.snapshots.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(job) + b"\n")
    return child


def _reap(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(OSError):
                pipe.close()
    child.wait()
