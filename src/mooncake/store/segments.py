"""Calls about the segments that this store contributes."""

from collections.abc import Sequence
from typing import Any

from mooncake.errors import ErrorCode, MooncakeError
from mooncake.store.member import Member, NotSetUpError, logger

FAILED = int(ErrorCode.INTERNAL_ERROR)
_NOTHING: dict[str, Any] = {"ret": FAILED, "segment_ids": [], "allocated_size": 0}


class Segments(Member):
    """Memory that comes and goes while the store is in use.  Segments go by ids, texts of two numbers."""

    def allocate_and_mount_segment(self, size: int, protocol: str = "tcp", location: str = "") -> dict[str, Any]:
        """Contribute `size` bytes more, rounded up to 16 MiB: {"ret": 0, "segment_ids": [id], "allocated_size": bytes};
        "ret" is -1 if they cannot be had, and the log says why.  `protocol` and `location` are accepted."""
        _check_unsigned("size", size)
        try:
            client = self._joined()
            if not size or client.config.is_dummy:
                return dict(_NOTHING)
            segment, size = client.mounts.allocate(size)
        except NotSetUpError:
            return dict(_NOTHING)
        except (MooncakeError, OSError) as error:
            logger.error("allocate_and_mount_segment: %s", error)
            return dict(_NOTHING)
        return {"ret": 0, "segment_ids": [segment], "allocated_size": size}

    def unmount_and_free_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Take segments that allocate_and_mount_segment gave out of the pool, with the values in them: 0, or -1 if one
        is unknown.  Reads that are under way end well, so there is nothing that a grace period would be needed for."""
        _check_unsigned("grace_period_seconds", grace_period_seconds)
        try:
            return 0 if self._joined().mounts.unmount(list(segment_ids)) else FAILED
        except NotSetUpError:
            return FAILED


def _check_unsigned(name: str, number: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise TypeError(f"{name} is {number!r}; expected a whole number, 0 or more")
