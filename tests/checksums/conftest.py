"""Fixtures: a pool whose clients use checksums, ways to damage its bytes, and what both sides have counted."""

import os
import re
from pathlib import Path

import msgspec
import pytest

from tests.relays import DamagingRelay

MIB = 1 << 20


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setenv("MOONCAKE_STORE_CHECKSUM", "always")


def places(store, key: str) -> list[list[int]]:
    """Where a reader would find it: [segment, offset, length, ...] a replica."""
    gets = store._client.gets
    located = gets.locate([key])
    gets.finish(located)
    return located.found[0].places


def flip(segment: int, offset: int) -> None:
    """Change one byte of a segment, as broken hardware would: through the descriptor of whichever process has it."""
    name = f"/memfd:mooncake-segment-{segment:x}"
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(name):
                fd = os.open(link, os.O_RDWR)
                break
        except OSError:
            continue
    else:
        raise AssertionError(f"no process has segment {segment:#x}")
    old = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([old[0] ^ 0x10]), offset)
    os.close(fd)


def damage(store, key: str, replica: int = 0, at: int = 0) -> None:
    """Change the byte `at` of a replica's first extent."""
    segment, offset, *_ = places(store, key)[replica]
    flip(segment, offset + at)


def counted(store) -> int:
    """Mismatches that this client has counted."""
    families = {family.name: family for family in store._client.meter.families(store._client)}
    return int(families["mooncake_client_checksum_mismatches_total"].samples[0][2])


@pytest.fixture
def relayed(cleanup):
    """Has a store reach segments through a relay that changes a byte."""

    def make(store, back: bool, spoil: int) -> list[DamagingRelay]:
        attachments, relays = store._client.attachments, []
        ask = attachments.info

        def info(segment: int):
            known = ask(segment)
            relay = DamagingRelay(known.tcp, back, spoil)
            cleanup.callback(relay.close)
            relays.append(relay)
            return msgspec.structs.replace(known, tcp=relay.address)

        attachments.info = info
        return relays

    return make


def spoil_disk(path: Path) -> int:
    """Change a byte in the middle of each data file; how many there were."""
    files = [file for file in path.rglob("*.data") if re.fullmatch(r"[0-9a-f]{16}", file.stem)]
    for file in files:
        with open(file, "r+b") as f:
            f.seek(2000)
            old = f.read(1)
            f.seek(2000)
            f.write(bytes([old[0] ^ 1]))
    return len(files)
