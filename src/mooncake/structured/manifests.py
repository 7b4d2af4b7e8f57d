"""What a bundle's manifest says, and what may be believed of it.

    {"version": 1, "layout": "bundle", "object_id": "PARTITION/ID", "meta": PAYLOAD, "buffers": {NAME: PAYLOAD}}

in JSON; a payload is {"key", "bytes", "chunks": [{"key", "bytes"}]}, its chunks values of the pool one after another.
A manifest may come from anywhere: all keys that it names must lie below PREFIX/PARTITION/ID, or removing one bundle
could remove another.
"""

import json
from collections.abc import Mapping
from typing import Any

VERSION = 1


def segment(name: Any, what: str) -> str:
    """A part of a key.  Raises ValueError unless it is a string that is not empty and has no slash."""
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"{what} {name!r} cannot be part of a key: expected a string without slashes, and not empty")
    return name


def base_of(prefix: str, object_id: str) -> str:
    """What all keys of a bundle begin with, before the next slash."""
    return f"{prefix}/{object_id}"


def decode(raw: bytes, prefix: str, key: str) -> dict[str, Any]:
    """The manifest that these bytes are.  Raises ValueError that says what is wrong with them."""
    try:
        manifest = json.loads(raw)
    except ValueError:
        raise ValueError(f"what lies at {key!r} is no manifest of a bundle: it is not JSON") from None
    return checked(manifest, prefix)


def checked(manifest: Any, prefix: str) -> dict[str, Any]:
    """The manifest.  Raises ValueError for one that names keys out of its namespace, or does not add up."""
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION or manifest.get("layout") != "bundle":
        raise ValueError(f"this is no manifest of a bundle: expected version {VERSION} and layout 'bundle'")
    object_id, buffers = manifest.get("object_id"), manifest.get("buffers")
    if not isinstance(object_id, str) or not isinstance(buffers, dict):
        raise ValueError("a manifest of a bundle must have an object_id that is a string, and a mapping of buffers")
    base = base_of(prefix, object_id)
    _check_payload(manifest.get("meta"), base, "meta")
    for name, payload in buffers.items():
        _check_payload(payload, base, segment(name, "buffer name"))
    return manifest


def payload_keys(manifest: Mapping[str, Any]) -> list[str]:
    """Keys of all chunks."""
    payloads = [manifest["meta"], *manifest["buffers"].values()]
    return [chunk["key"] for payload in payloads for chunk in payload["chunks"]]


def _check_payload(payload: Any, base: str, name: str) -> None:
    if not isinstance(payload, dict) or not isinstance(payload.get("chunks"), list):
        raise ValueError(f"buffer {name!r} of the manifest has no list of chunks")
    key = payload.get("key")
    if not isinstance(key, str) or not key.startswith(f"{base}/"):
        raise ValueError(f"buffer {name!r} of the manifest has the key {key!r}, out of the namespace {base!r}")
    total = 0
    seen: set[str] = set()
    for chunk in payload["chunks"]:
        at = chunk.get("key") if isinstance(chunk, dict) else None
        if not isinstance(at, str) or (at != key and not at.startswith(f"{key}/")) or at in seen:
            raise ValueError(
                f"buffer {name!r} of the manifest has a chunk {at!r}, out of the namespace {key!r}, or twice"
            )
        seen.add(at)
        total += _size(chunk.get("bytes"), name)
    if total != _size(payload.get("bytes"), name):
        raise ValueError(f"buffer {name!r} of the manifest has chunks of {total} bytes, but says {payload['bytes']}")


def _size(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"buffer {name!r} of the manifest has {value!r} bytes")
    return value
