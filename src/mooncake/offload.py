"""What a segment server is told of its SSD tier: a directory, and the MOONCAKE_OFFLOAD_* variables."""

import os
import stat
import tempfile

from mooncake.config_text import environment_whole
from mooncake.errors import ConfigError
from mooncake.rpc.disk_messages import DiskSettings

_PREFIX = "MOONCAKE_OFFLOAD_"
_BLOCK = 4096
_SMALLEST_STAGING = 16 << 20
_USUAL_STAGING = 64 << 20  # at least, if nobody says otherwise
_LARGEST_STAGING = 1280 << 20  # the drop-in's default, for a large segment
_LOCAL_BACKENDS = ("bucket_storage_backend", "file_per_key_storage_backend", "offset_allocator_storage_backend")


class OffloadPathError(ConfigError):
    """The directory cannot hold an SSD tier."""


def offload_settings(path: str, segment_size: int) -> DiskSettings:
    """Those of a tier in `path` ("": where MOONCAKE_OFFLOAD_FILE_STORAGE_PATH says) beside a segment of `segment_size`
    bytes.  Raises OffloadPathError; ConfigError for a wrong variable."""
    path = path or os.environ.get(_PREFIX + "FILE_STORAGE_PATH", "") or "/data/file_storage"
    _check_directory(path)
    backend = os.environ.get(_PREFIX + "STORAGE_BACKEND_DESCRIPTOR", _LOCAL_BACKENDS[0])
    if backend not in _LOCAL_BACKENDS:
        raise ConfigError(
            f"{_PREFIX}STORAGE_BACKEND_DESCRIPTOR is {backend!r}; expected {' or '.join(_LOCAL_BACKENDS)} (which all "
            "mean the same log of large files here)"
        )
    policy = os.environ.get(_PREFIX + "BUCKET_EVICTION_POLICY", "fifo").lower()
    if policy not in ("fifo", "lru"):
        raise ConfigError(f"{_PREFIX}BUCKET_EVICTION_POLICY is {policy!r}; expected fifo or lru")
    staging = min(_LARGEST_STAGING, max(_USUAL_STAGING, segment_size // 4))
    given = environment_whole(_PREFIX + "LOCAL_BUFFER_SIZE_BYTES", 0)
    limits = [environment_whole(_PREFIX + name, 0) for name in ("TOTAL_SIZE_LIMIT_BYTES", "BUCKET_MAX_TOTAL_SIZE")]
    return DiskSettings(
        path=path,
        staging=-(-max(_SMALLEST_STAGING, given or staging) // _BLOCK) * _BLOCK,
        quota=min([limit for limit in limits if limit], default=0),
        keys_limit=environment_whole(_PREFIX + "TOTAL_KEYS_LIMIT", 10_000_000),
        file_limit=environment_whole(_PREFIX + "BUCKET_SIZE_LIMIT_BYTES", 256 << 20),
        ttl_ms=max(100, environment_whole(_PREFIX + "CLIENT_BUFFER_GC_TTL_MS", 5000)),
        lru=policy == "lru",
        compaction=environment_whole(_PREFIX + "COMPACTION_BYTES_PER_S", 128 << 20),
    )


def _check_directory(path: str) -> None:
    wanted = "give an existing directory, by its absolute path, that this user may write to"
    if not os.path.isabs(path):
        raise OffloadPathError(f"the SSD directory {path!r} is not an absolute path; {wanted}")
    try:
        mode = os.lstat(path).st_mode
    except OSError as error:
        raise OffloadPathError(f"the SSD directory {path!r} cannot be used ({error.strerror}); {wanted}") from None
    if stat.S_ISLNK(mode):
        raise OffloadPathError(f"the SSD directory {path!r} is a symbolic link; {wanted}")
    if not stat.S_ISDIR(mode):
        raise OffloadPathError(f"the SSD directory {path!r} is not a directory; {wanted}")
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OffloadPathError(
            f"the SSD directory {path!r} cannot be written to ({error.strerror}); {wanted}"
        ) from None
