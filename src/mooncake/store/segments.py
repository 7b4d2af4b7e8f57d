"""Calls about the segments that this store contributes, and about their disks."""

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mooncake.errors import ConfigError, ErrorCode, MooncakeError
from mooncake.store.member import INVALID, Member, NotSetUpError, logger

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient

FAILED = int(ErrorCode.INTERNAL_ERROR)


class Segments(Member):
    """Memory that comes and goes while the store is in use.  Segments go by ids, texts of two numbers."""

    def allocate_and_mount_segment(self, size: int, protocol: str = "tcp", location: str = "") -> dict[str, Any]:
        """Contribute `size` bytes more, rounded up to 16 MiB: {"ret": 0, "segment_ids": [id], "allocated_size": bytes};
        "ret" is -1 if they cannot be had, and the log says why.  `protocol` and `location` are accepted."""
        _check_unsigned("size", size)
        if not size:
            return {"ret": FAILED, "segment_ids": [], "allocated_size": 0}
        found: list[int] = []

        def mount(client: "StoreClient") -> str:
            segment, allocated = client.mounts.allocate(size)
            found.append(allocated)
            return segment

        mounted = self._mount("allocate_and_mount_segment", mount)
        return {**mounted, "allocated_size": found[0] if found else 0}

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Contribute `size` bytes of a file, from `offset` on, which are overwritten: {"ret": 0, "segment_ids": [id]}.
        The file is an existing one, such as one in /dev/shm, by its absolute path, and stays when the segment goes.
        "ret" is -600 if these bytes of it cannot be used, -1 if they cannot be mounted, and the log says why.
        `protocol` and `location` are accepted."""
        _check_unsigned("size", size)
        _check_unsigned("offset", offset)
        if not size:
            return {"ret": INVALID, "segment_ids": []}
        path = str(path)
        try:
            self._check_file(path, offset, size)
        except ConfigError as error:
            logger.error("mount_segment: %s", error)
            return {"ret": INVALID, "segment_ids": []}
        return self._mount("mount_segment", lambda client: client.mounts.mount_file(path, offset, size))

    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Take segments that mount_segment gave out of the pool, with the values in them: 0, or -1 if one is unknown.

        With a grace period nothing new is put there from now on, while values stay readable until it is over; the call
        does not wait for that."""
        return self._unmount(segment_ids, grace_period_seconds)

    def unmount_and_free_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """As unmount_segment, of segments that allocate_and_mount_segment gave."""
        return self._unmount(segment_ids, grace_period_seconds)

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Take what is on this store's disks out of the pool, before the process goes: 0, also without an SSD tier, or
        when called again.  Nothing more is written there.  Returns after the grace period, in which reads that were
        begun before can end; the files stay, for the next server that is given the directory."""
        _check_unsigned("grace_period_seconds", grace_period_seconds)
        try:
            client = self._joined()
        except NotSetUpError:
            return INVALID
        if client.config.disk is not None:
            client.mounts.leave_disk()
            time.sleep(grace_period_seconds)
        return 0

    def get_offload_rpc_read_count(self) -> int:
        """How many times this store has asked a segment server for values that were only on its disk."""
        client = self._client
        return client.disks.reads if client is not None else 0

    # -- inside

    def _mount(self, call: str, mount: "Callable[[StoreClient], str]") -> dict[str, Any]:
        try:
            client = self._joined()
            if not client.config.is_dummy:
                return {"ret": 0, "segment_ids": [mount(client)]}
        except NotSetUpError:
            pass
        except (MooncakeError, OSError) as error:
            logger.error("%s: %s", call, error)
        return {"ret": FAILED, "segment_ids": []}

    def _check_file(self, path: str, offset: int, size: int) -> None:
        """Raises ConfigError."""
        from mooncake.transfer.file_memory import open_file

        os.close(open_file(path, offset, size))

    def _unmount(self, segment_ids: Sequence[str], grace_period_seconds: int) -> int:
        _check_unsigned("grace_period_seconds", grace_period_seconds)
        try:
            return 0 if self._joined().mounts.unmount(list(segment_ids), grace_period_seconds) else FAILED
        except NotSetUpError:
            return FAILED


def _check_unsigned(name: str, number: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise TypeError(f"{name} is {number!r}; expected a whole number, 0 or more")
