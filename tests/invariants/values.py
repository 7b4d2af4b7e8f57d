"""Values that say what they are: no word of one is found in another one, nor at another place of the same.

A value is a line of 64-bit words, word i being h(key, version) + i * C modulo 2**64 with a 64-bit hash h; the first
three tell the hash of the key, the version and the size, so that what was read names the put that wrote it.
"""

import hashlib
import struct

import numpy as np

HEAD = struct.Struct("<QQQ")  # hash of the key, version, size
SMALLEST = HEAD.size
_STEP = 0x9E3779B97F4A7C15


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def value(key: str, version: int, size: int) -> bytes:
    """`size` bytes, at least SMALLEST."""
    words = np.arange(-(-size // 8), dtype=np.uint64)
    words *= np.uint64(_STEP)
    words += np.uint64(_hash(key, version))
    return HEAD.pack(_hash(key), version, size) + words.tobytes()[HEAD.size : size]


def version_of(key: str, got: bytes) -> tuple[int, str]:
    """(version, "") of the put under `key` that wrote exactly these bytes; (-1, why) if no put did."""
    if len(got) < HEAD.size:
        return -1, f"{len(got)} bytes, which is no value at all"
    whose, version, size = HEAD.unpack_from(got)
    if whose != _hash(key):
        return -1, "the value of another key, or none"
    if size != len(got):
        return -1, f"{len(got)} bytes of version {version}, which has {size}"
    expected = value(key, version, size)
    if got != expected:
        first = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
        count = int((np.frombuffer(got, np.uint8) != np.frombuffer(expected, np.uint8)).sum())
        return -1, f"{count} of {size} bytes of version {version} differ, the first at {first}"
    return version, ""
