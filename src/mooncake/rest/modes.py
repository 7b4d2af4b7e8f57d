"""What /api/reconfigure switches between: a node that decodes lends the pool a file's bytes (its shared memory), one
that prefills does not."""

import threading
from typing import NamedTuple

from mooncake.store import MooncakeDistributedStore

DECODE, PREFILL = "decode", "prefill"


class UnmountError(Exception):
    """Segments could not be unmounted."""


class Change(NamedTuple):
    """What there is now.  `error`: why it is not what was asked for, else ""."""

    mode: str
    segments: list[str]
    error: str = ""


class Modes:
    """The present mode and its segments.  Changes come one after another; each may take seconds."""

    def __init__(self, store: MooncakeDistributedStore) -> None:
        self._store = store
        self._path = ""
        self._segments: list[str] = []
        self._lock = threading.Lock()

    def decode(self, path: str, size: int, offset: int, protocol: str, location: str) -> Change:
        """Lend these bytes instead of those that are lent now.  If they cannot be mounted, those stay; unless they are
        of the same file, in which two segments must not lie over each other: then nothing is lent."""
        with self._lock:
            if path == self._path:
                self._retire()
            mounted = self._store.mount_segment(path, size, offset, protocol, location)
            if mounted["ret"]:
                kept = "keeping previous decode segments" if self._segments else "rolled back to prefill"
                return Change(self._mode, self._segments, f"Mount failed, ret={mounted['ret']}; {kept}")
            self._retire()
            self._path = path
            self._segments = [*mounted["segment_ids"], *self._segments]
            return Change(DECODE, self._segments)

    def prefill(self) -> None:
        """Lend nothing.  Raises UnmountError."""
        with self._lock:
            if self._segments:
                code = self._store.unmount_segment(self._segments)
                if code:
                    raise UnmountError(f"Unmount failed, ret={code}")
            self._segments, self._path = [], ""

    def unmount(self, segments: list[str], grace: int) -> list[str]:
        """Any segments; those that could not be unmounted."""
        with self._lock:
            failed = [segment for segment in segments if self._store.unmount_segment([segment], grace)]
            self._segments = [one for one in self._segments if one in failed or one not in segments]
            if not self._segments:
                self._path = ""
            return failed

    @property
    def _mode(self) -> str:
        return DECODE if self._segments else PREFILL

    def _retire(self) -> None:
        """Unmount what is lent; what cannot be unmounted stays listed."""
        self._segments = [segment for segment in self._segments if self._store.unmount_segment([segment])]
        self._path = ""
