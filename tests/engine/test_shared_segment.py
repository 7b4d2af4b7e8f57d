"""SharedSegment: ranks that are processes share memory, and nothing is left of it."""

import ctypes
import os
from pathlib import Path

import pytest

from mooncake.engine import SharedSegment
from tests.processes import Worker

SIZE = 3 << 20
CREATE = """
import ctypes
from mooncake.engine import SharedSegment
segment, blob = SharedSegment.create(name, size, world, rank, owner)
result = blob.hex()
"""
COMPLETE = """
segment.complete([bytes.fromhex(blob) for blob in blobs])
memory = (ctypes.c_ubyte * size).from_address(segment.base_addr())
result = [segment.ready(), segment.size(), segment.device_addr()]
"""


@pytest.fixture
def ranks(cleanup):
    made = [Worker() for _ in range(3)]
    for worker in made:
        cleanup.callback(worker.close)
    return made


def create(ranks, owner: int = 1) -> list[str]:
    names = {"name": "kv", "size": SIZE, "world": len(ranks), "owner": owner}
    return [worker(CREATE, rank=rank, **names) for rank, worker in enumerate(ranks)]


def test_all_ranks_see_the_same_bytes(ranks):
    blobs = create(ranks)
    assert [worker("result = [segment.ready(), segment.base_addr() > 0]") for worker in ranks] == [
        [False, False],
        [False, True],
        [False, False],
    ]
    for worker in ranks:
        assert worker(COMPLETE, blobs=blobs, size=SIZE) == [True, SIZE, 0]
    for worker in ranks:
        worker("memory[rank * 1000] = 7 + rank; memory[size - 1] += 1")
    for worker in ranks:
        assert worker("result = [memory[0], memory[1000], memory[2000], memory[size - 1]]") == [7, 8, 9, 3]
    ranks[1].kill()  # the owner: what is mapped stays
    assert ranks[2]("result = memory[1000]") == 8
    assert not [name for name in os.listdir("/dev/shm") if "kv" in name and "mooncake" in name]


def test_an_owner_that_is_gone(ranks):
    blobs = create(ranks)
    ranks[1].kill()
    with pytest.raises(AssertionError, match="has ended or let it go"):
        ranks[0](COMPLETE, blobs=blobs, size=SIZE)
    assert ranks[0]("result = segment.ready()") is False


def test_an_owner_that_let_it_go(ranks):
    blobs = create(ranks)
    ranks[1]("del segment")
    with pytest.raises(AssertionError, match="let it go"):
        ranks[0](COMPLETE, blobs=blobs, size=SIZE)


def test_what_is_refused(ranks):
    for arguments, word in [
        (("n", 0, 1, 0), "0 bytes"),
        (("n", 10, 1, 1), "rank 1"),
        (("n", 10, 2, 0, 2), "owner 2"),
        (("n", 10, 1, 0, 0, 0, False), "not supported"),
        (("n", 10, 1, 0, 0, 0, True, True), "not supported"),
        (("n", 1 << 62, 1, 0), "cannot be had"),
    ]:
        with pytest.raises(RuntimeError, match=word):
            SharedSegment.create(*arguments)
    assert SharedSegment.supported()
    assert not SharedSegment.supported(mmap=False)
    assert not SharedSegment.supported(host_register=True)
    segment, blob = SharedSegment.create("n", 10, 2, 0)
    _, other = SharedSegment.create("n", 10, 2, 1)
    _, strange = SharedSegment.create("m", 10, 2, 1)
    for blobs in ([], [blob], [other, blob], [blob, strange], [blob, b"\xff"], [blob, ""], [blob, other, other]):
        with pytest.raises(RuntimeError, match="shared segment 'n'"):
            segment.complete(blobs)
        assert not segment.ready()
    segment.complete([blob.decode("latin-1"), other])
    assert segment.ready()


def test_nothing_is_left():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        segment, blob = SharedSegment.create("x/y" * 100, 4096, 1, 0)
        segment.complete([blob])
        ctypes.memset(segment.base_addr(), 1, 4096)
        del segment
    assert len(os.listdir("/proc/self/fd")) <= before
    assert "mooncake-x" not in Path("/proc/self/maps").read_text()
