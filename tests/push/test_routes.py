"""Bytes go to their places, whatever the order of the KV cache and the number of ranks on either side."""

import ctypes
import itertools

import numpy as np
import pytest

from mooncake.errors import ConfigError
from mooncake.vllm.push.geometry import layers_of
from mooncake.vllm.push.heads import heads_of
from mooncake.vllm.push.routes import Ranks, make_route
from tests.push.memory import BLOCK, BLOCKS, HEADS, KINDS, LAYERS, Memory, content


def copied(prefill: Memory, decode: Memory, sizes: tuple[int, int], ranks: tuple[int, int], stages: tuple[int, int]):
    """Copies blocks 1, 4 and 5 of prefill to 6, 2 and 0 of decode; the route."""
    here, there = Ranks(ranks[0], sizes[0], stages[0], 1), Ranks(ranks[1], sizes[1], stages[1], 1)
    route = make_route(prefill.layers, here, decode.layers, there, HEADS)
    if route is not None:
        near, far = route.pieces(route.layers, np.array([1, 4, 5]), np.array([6, 2, 0]))
        for at, to, length in zip(near.addresses, far.addresses, near.lengths, strict=True):
            ctypes.memmove(int(to), int(at), int(length))
        assert near.total == 3 * route.block_bytes.sum()
    return route


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product(KINDS, KINDS)))
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (4, 1), (2, 4), (8, 2), (1, 8), (8, 8)])
def test_any_order_any_ranks(prefill, decode, sizes):
    senders = [Memory(prefill, heads_of(rank, sizes[0], HEADS)) for rank in range(sizes[0])]
    for sender in senders:
        for block in (1, 4, 5):
            sender.fill(block, block)
    for rank in range(sizes[1]):
        receiver = Memory(decode, heads_of(rank, sizes[1], HEADS))
        for source, sender in enumerate(senders):
            copied(sender, receiver, sizes, (source, rank), (0, 0))
        for was, now in ((1, 6), (4, 2), (5, 0)):
            receiver.check(now, was)
        assert not receiver.touched({0, 2, 6})


@pytest.mark.parametrize("kind", KINDS)
def test_equal_blocks_are_as_few_pieces_as_their_memory_has(kind):
    sender, receiver = (Memory(kind, heads_of(0, 1, HEADS)) for _ in range(2))
    route = copied(sender, receiver, (1, 1), (0, 0), (0, 0))
    near, _ = route.pieces(route.layers, np.array([1, 2]), np.array([3, 4]))
    assert len(near.lengths) == 2 * LAYERS * (2 if kind == "K and V outermost" else 1)
    assert near.total == 2 * sum(sender.layers.block_bytes)


def test_layers_that_the_peer_has_not_stay():
    sender, receiver = Memory("heads first", heads_of(0, 1, HEADS)), Memory("tokens first", heads_of(0, 1, HEADS))
    sender.fill(1, 1)
    part = layers_of(dict(list(receiver.caches.items())[1:2]), BLOCKS, BLOCK)
    route = make_route(sender.layers, Ranks(0, 1, 0, 1), part, Ranks(0, 1, 1, 2), HEADS)
    assert route.layers.tolist() == [1]
    assert (route.block_bytes > 0).tolist() == [False, True, False]


def test_ranges_cover_the_blocks():
    memory = Memory("heads first", heads_of(0, 1, HEADS))
    size = memory.layers.strides[0]
    ranges = memory.layers.ranges([5, 1, 2])
    assert ranges[:2] == [(memory.layers.bases[0] + size, memory.layers.bases[0] + 3 * size),
                          (memory.layers.bases[0] + 5 * size, memory.layers.bases[0] + 6 * size)]  # fmt: skip
    assert len(ranges) == 2 * LAYERS


def test_what_cannot_be_exchanged_is_refused_by_name():
    one = Memory("heads first", heads_of(0, 1, HEADS))
    other = Memory("heads first", heads_of(0, 1, HEADS), dtype=np.float64)
    with pytest.raises(ConfigError, match=r"layer layers.0: prefill's blocks are .*float32.*float64.*must be the same"):
        make_route(one.layers, Ranks(0, 1, 0, 1), other.layers, Ranks(0, 1, 0, 1), HEADS)
    with pytest.raises(ConfigError, match="8 KV heads where 4 were expected"):
        make_route(one.layers, Ranks(0, 2, 0, 1), one.layers, Ranks(0, 1, 0, 1), HEADS)
    with pytest.raises(ConfigError, match="8 KV heads cannot be shared out evenly between 3 ranks"):
        make_route(one.layers, Ranks(0, 3, 0, 1), one.layers, Ranks(0, 1, 0, 1), HEADS)
    with pytest.raises(ConfigError, match="blocks should be of 7 tokens"):
        layers_of(one.caches, BLOCKS, 7)
    with pytest.raises(ConfigError, match="Mamba"):
        layers_of({"layers.0": [one.caches["layers.0"]]}, BLOCKS, BLOCK)
    with pytest.raises(ConfigError, match="no KV cache"):
        layers_of({}, BLOCKS, BLOCK)


def test_content_differs_everywhere():
    values = [content(layer, head, block) for layer in range(2) for head in range(2) for block in range(2)]
    assert len(np.unique(np.concatenate([value.ravel() for value in values]))) == 8 * values[0].size
