"""What a worker holds of a group's blocks under tensor parallelism, and what other sizes find of it."""

from types import SimpleNamespace as Names

import numpy as np
import pytest

from mooncake.errors import ConfigError
from mooncake.vllm.layout import Layout
from mooncake.vllm.shards import Cut, cut_of, narrowed
from tests.connector.test_identity import FullAttentionSpec, MambaSpec, MLAAttentionSpec
from tests.connector.test_layout import BLOCKS, Tensor, value


def cut(size: int, rank: int, shared: int, heads: int = 8, spec=None) -> Cut:
    """For a model of so many heads in all."""
    config = Names(
        parallel_config=Names(tensor_parallel_size=size), model_config=Names(get_total_num_kv_heads=lambda: heads)
    )
    return cut_of(config, spec or FullAttentionSpec(num_kv_heads=max(1, heads // size)), rank, shared)


def test_every_rank_holds_its_own_heads():
    assert [cut(2, rank, 0) for rank in range(2)] == [Cut(0, 1, 2, True), Cut(1, 1, 2, True)]
    assert cut(1, 0, 0) == Cut(0, 1, 1, True)


def test_shards_are_cut_for_the_largest_size_that_shares():
    assert cut(1, 0, 4) == Cut(0, 4, 4, True)
    assert [cut(2, rank, 4) for rank in range(2)] == [Cut(0, 2, 4, True), Cut(2, 2, 4, True)]
    assert [cut(4, rank, 4) for rank in range(4)] == [Cut(rank, 1, 4, True) for rank in range(4)]


def test_ranks_beyond_the_heads_hold_what_others_hold():
    assert [cut(8, rank, 8, heads=2) for rank in (0, 3, 4, 7)] == [
        Cut(0, 1, 2, True), Cut(0, 1, 2, False), Cut(1, 1, 2, True), Cut(1, 1, 2, False),
    ]  # fmt: skip
    assert cut(1, 0, 8, heads=2) == Cut(0, 2, 2, True)


def test_latent_attention_is_the_same_everywhere():
    assert [cut(4, rank, 0, spec=MLAAttentionSpec()) for rank in (0, 3)] == [Cut(0, 1, 1, True), Cut(0, 1, 1, False)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"size": 4, "rank": 0, "shared": 2}, "shared_tp 2 .* no multiple of the tensor parallel size 4"),
        ({"size": 1, "rank": 0, "shared": 4, "heads": 6}, "6 heads of attention cannot be cut into 4"),
        ({"size": 1, "rank": 0, "shared": 2, "spec": MambaSpec()}, "Mamba"),
    ],
)
def test_what_cannot_be_cut(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        cut(**arguments)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_a_shard_is_the_same_bytes_for_every_size(order):
    """Also where a token's heads lie side by side, and a shard of a block is a piece for each token."""

    kept = []

    class Cache(Tensor):
        ndim = 4

        def narrow(self, axis, start, count):
            index = [slice(None)] * 4
            index[axis] = slice(start, start + count)
            return Cache(self.array[tuple(index)], self._storage)

    def cache(content: np.ndarray) -> Cache:
        """[block, head, token, content] that lies in memory in that order."""
        memory = np.ascontiguousarray(content.transpose(order))
        kept.append(memory)  # a layout has addresses only
        return Cache(memory.transpose(np.argsort(order)), memory)

    whole = np.random.default_rng(1).integers(0, 1 << 30, (BLOCKS, 4, 8, 16)).astype(np.int32)
    one = [Layout(narrowed({"0": cache(whole)}, FullAttentionSpec(num_kv_heads=4), i, 4), BLOCKS) for i in range(4)]
    four = [Layout({"0": cache(whole[:, i : i + 1])}, BLOCKS) for i in range(4)]
    for part, own in zip(one, four, strict=True):
        assert part.text == own.text
        assert value(part, 3) == value(own, 3)
    two = Layout(narrowed({"0": cache(whole[:, 2:])}, FullAttentionSpec(num_kv_heads=2), 1, 2), BLOCKS)
    assert value(two, 5) == value(four[3], 5)
    with pytest.raises(ConfigError, match="its 2 heads are not found"):
        narrowed({"0": cache(whole)}, FullAttentionSpec(num_kv_heads=2), 0, 2)
