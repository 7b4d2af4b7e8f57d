"""Fingerprints of what a model's or an adapter's files hold, whatever the folder is called.

Weights are gigabytes, so their values are sampled: of every tensor its name, type and shape, and at least eight places
spread over it (all of it up to 16 KiB).  Two trainings of one model differ in all of these; what differs in single
numbers of a large tensor only must be told apart by the user (`weights_id`).  Adapters are hashed whole.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WHOLE = 16 << 10  # bytes up to which a tensor is hashed whole
_SAMPLES, _SAMPLE = 8, 512
_OPAQUE_SAMPLES = 4096
_LARGEST_HEADER = 256 << 20
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # a folder's first kind counts
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def model_fingerprint(path: Path) -> str:
    """Of a folder with config.json and weights, or of one file of weights.  Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    if path.is_file():
        _add_file(digest, path)
        return digest.hexdigest()
    config = path / "config.json"
    if config.exists():
        digest.update(json.dumps(json.loads(config.read_bytes()), sort_keys=True).encode())
    files = _weight_files(path)
    for file in files:
        digest.update(f"{file.name}\0".encode())
        _add_file(digest, file)
    if not files:
        digest.update(b"no weights")
    return digest.hexdigest()


def adapter_fingerprint(path: Path) -> str:
    """Of all files of an adapter's folder, whole.  Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(path.iterdir()):
        if file.suffix in (*_SUFFIXES, ".json"):
            digest.update(f"{file.name} {file.stat().st_size}\0".encode())
            with file.open("rb") as content:
                while data := content.read(1 << 20):
                    digest.update(data)
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    for suffix in _SUFFIXES:
        files = sorted(file for file in folder.glob(f"*{suffix}") if file.name not in _NOT_WEIGHTS)
        if files:
            return files
    return []


def _add_file(digest: Any, file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        digest.update(f"{size}\0".encode())
        for offset, length in _samples(descriptor, size, file.suffix):
            digest.update(os.pread(descriptor, length, offset))
    finally:
        os.close(descriptor)


def _samples(descriptor: int, size: int, suffix: str) -> Iterator[tuple[int, int]]:
    """(offset, length) of what to hash of a file."""
    header = int.from_bytes(os.pread(descriptor, 8, 0), "little") if suffix == ".safetensors" else 0
    if not 0 < header <= min(size - 8, _LARGEST_HEADER):
        yield from _spread(0, size, _OPAQUE_SAMPLES)
        return
    yield 0, 8 + header
    for name, tensor in json.loads(os.pread(descriptor, header, 8)).items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            yield from _spread(8 + header + start, end - start, _SAMPLES)


def _spread(start: int, length: int, count: int) -> Iterator[tuple[int, int]]:
    """`count` samples over a range, its first and last bytes among them."""
    if length <= max(_WHOLE, count * _SAMPLE):
        yield start, length
        return
    for i in range(count):
        yield start + (length - _SAMPLE) * i // (count - 1), _SAMPLE
