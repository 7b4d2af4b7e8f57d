"""The vectored copies: every shape of pieces against a plain Python copy."""

import ctypes
import mmap
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.errors import TransferError
from mooncake.transfer import pieces as p

SIZE = 1 << 20


def memory(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@st.composite
def layouts(draw):
    """Disjoint pieces in shuffled order: (offset, length) each, regular or crooked."""
    unit = draw(st.sampled_from([1, 7, 64, 512, 4096, 16384]))
    count = draw(st.integers(1, 24))
    lengths = draw(
        st.one_of(
            st.just([draw(st.integers(1, 3)) * unit] * count),
            st.lists(st.integers(1, 3).map(lambda n: n * unit), min_size=count, max_size=count),
        )
    )
    shift = draw(st.sampled_from([0, 1, 16, 4096]))
    at, out = shift, []
    for length in lengths:
        at += draw(st.sampled_from([0, unit, 3 * unit, 13]))
        if at + length > SIZE:
            break
        out.append((at, length))
        at += length
    return draw(st.permutations(out)) if out else [(0, 1)]


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_gather_and_scatter_move_exactly_the_bytes(layout):
    source, target = memory(1), memory(2)
    total = sum(length for _, length in layout)
    vector = p.pieces_of([address(source) + at for at, _ in layout], [length for _, length in layout])
    want = b"".join(source[at : at + length].tobytes() for at, length in layout)
    after = target[total:].copy()
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, SIZE)
        if p.gather(vector, address(target)):
            assert target[:total].tobytes() == want
            assert (target[total:] == after).all()
        p.write_file(fd, 0, vector)
        assert os.pread(fd, total, 0) == want
        scattered, careful = memory(3), memory(3)
        untouched = np.ones(SIZE, bool)
        for at, length in layout:
            untouched[at : at + length] = False
        back = p.pieces_of([address(scattered) + at for at, _ in layout], vector.lengths)
        flat = np.frombuffer(want, np.uint8).copy()
        if p.scatter(address(flat), back):
            for at, length in layout:
                assert (scattered[at : at + length] == source[at : at + length]).all()
            assert (scattered[untouched] == memory(3)[untouched]).all()
        p.read_file(fd, 0, p.pieces_of([address(careful) + at for at, _ in layout], vector.lengths))
        for at, length in layout:
            assert (careful[at : at + length] == source[at : at + length]).all()
    finally:
        os.close(fd)


@settings(max_examples=100, deadline=None)
@given(layouts(), st.data())
def test_part_is_a_cut_of_the_whole(layout, data):
    lengths = [length for _, length in layout]
    vector = p.pieces_of([at for at, _ in layout], lengths)
    start = data.draw(st.integers(0, sum(lengths) - 1))
    length = data.draw(st.integers(1, sum(lengths) - start))
    every = [at + i for at, n in layout for i in range(n)]
    cut = vector.part(start, length)
    got = [int(a) + i for a, n in zip(cut.addresses, cut.lengths, strict=True) for i in range(int(n))]
    assert got == every[start : start + length]


@given(
    st.lists(st.lists(st.integers(1, 1 << 62), max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 9), max_size=4),
    st.integers(1, 5),
)
def test_lists_are_flattened_the_same_whether_or_not_they_are_equal(ragged, sizes, count):
    for lists in (ragged, [sizes] * count, [list(sizes) for _ in range(count)], tuple(ragged)):
        lengths = [[7] * len(each) for each in lists]
        flat = [number for each in lists for number in each]
        assert p.flatten(lists, lengths).addresses.tolist() == flat
        assert p.flatten(lengths, lists).lengths.tolist() == [number for number in flat if number]


def test_more_pieces_than_a_system_call_takes():
    count = 5000
    source = memory(4)
    order = np.random.default_rng(0).permutation(count)
    vector = p.pieces_of([address(source) + int(i) * 3 for i in order], [3] * count)
    want = b"".join(source[int(i) * 3 : int(i) * 3 + 3].tobytes() for i in order)
    fd = os.memfd_create("test")
    p.write_file(fd, 100, vector)
    assert os.pread(fd, 3 * count, 100) == want
    os.close(fd)


def test_memory_that_is_not_mapped_is_an_error_not_a_crash():
    room = mmap.mmap(-1, 1 << 16)
    base = ctypes.addressof(ctypes.c_char.from_buffer(room))
    libc = ctypes.CDLL(None)
    libc.mprotect(ctypes.c_void_p(base + 4096), 4096, 0)
    vector = p.pieces_of([base, base + 4096], [100, 100])
    fd = os.memfd_create("test")
    with pytest.raises(TransferError, match="not mapped"):
        p.write_file(fd, 0, vector)
    os.ftruncate(fd, 1000)
    with pytest.raises(TransferError, match="not mapped"):
        p.read_file(fd, 0, vector)
    libc.mprotect(ctypes.c_void_p(base + 4096), 4096, 3)
    os.close(fd)
