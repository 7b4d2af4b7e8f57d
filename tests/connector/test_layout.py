"""Where a block's bytes are, for every order that engines keep their KV cache in."""

import itertools

import numpy as np
import pytest

from mooncake.errors import ConfigError
from mooncake.vllm.layout import Layout

BLOCKS = 7


class Tensor:
    """As much of a torch tensor as a layout asks for, over a numpy array."""

    def __init__(self, array: np.ndarray, storage: np.ndarray | None = None) -> None:
        self.array, self._storage = array, array if storage is None else storage
        self.shape, self.dtype = array.shape, f"torch.{array.dtype}"

    def stride(self):
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def data_ptr(self):
        return self.array.ctypes.data

    def element_size(self):
        return self.array.itemsize

    def untyped_storage(self):
        return Tensor(self._storage)

    def nbytes(self):
        return self._storage.nbytes


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 1 << 30, shape).astype(np.int32)


def value(layout: Layout, block: int) -> bytes:
    """The bytes of a block as its pieces give them."""
    import ctypes

    return b"".join(ctypes.string_at(int(at), int(size)) for at, size in zip(*layout.of([block]), strict=True))


def test_layers_outermost():
    memory = random(3, BLOCKS, 2, 4, 8)
    caches = {f"model.layers.{i}": Tensor(memory[i], memory) for i in range(3)}
    layout = Layout(caches, BLOCKS)
    assert layout.regions == {memory.ctypes.data: memory.nbytes}
    assert layout.shape.sizes.tolist() == [2 * 4 * 8 * 4] * 3
    for block in range(BLOCKS):
        assert value(layout, block) == memory[:, block].tobytes()


def test_blocks_outermost_are_one_piece_and_layers_come_by_number():
    memory = random(BLOCKS, 12, 2, 4, 8)
    names = [f"model.layers.{i}.attn" for i in range(12)]
    layout = Layout({name: Tensor(memory[:, i], memory) for i, name in reversed(list(enumerate(names)))}, BLOCKS)
    assert layout.shape.sizes.tolist() == [12 * 2 * 4 * 8 * 4]
    assert value(layout, 5) == memory[5].tobytes()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order_of_dimensions(order):
    memory = random(*(np.array([BLOCKS, 2, 4, 8])[list(order)]))
    cache = memory.transpose(np.argsort(order))  # [block, head, token, content], however it lies in memory
    assert cache.shape == (BLOCKS, 2, 4, 8)
    layout = Layout({"0": Tensor(cache, memory)}, BLOCKS)
    for block in range(BLOCKS):
        assert value(layout, block) == np.take(memory, block, axis=order.index(0)).tobytes()


def test_keys_and_values_apart_and_kernel_blocks():
    memory = random(2, BLOCKS * 3, 4, 8)  # keys of all blocks, then values; three kernel blocks a block
    layout = Layout({"0": Tensor(memory)}, BLOCKS)
    assert len(layout.shape.sizes) == 2
    assert value(layout, 2) == memory[:, 6:9].tobytes()


def test_orders_have_different_texts_and_equal_ones_the_same():
    def text(*order: int) -> str:
        memory = random(*(np.array([BLOCKS, 2, 4, 8])[list(order)]))
        return Layout({"0": Tensor(memory.transpose(np.argsort(order)), memory)}, BLOCKS).text

    texts = {order: text(*order) for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2))}
    assert len(set(texts.values())) == 3
    assert text(0, 1, 2, 3) == texts[0, 1, 2, 3]
    other = Layout({"0": Tensor(random(BLOCKS, 2, 4, 8).astype(np.int64))}, BLOCKS).text
    assert other not in texts.values()


def test_layers_that_share_a_cache_count_once():
    memory = random(BLOCKS, 2, 4, 8)
    assert Layout({"0": Tensor(memory), "1": Tensor(memory)}, BLOCKS).shape.block_bytes == 2 * 4 * 8 * 4


def test_a_layer_with_several_tensors():
    """The states of a Mamba layer, in pages that are larger than both."""
    pages = random(BLOCKS, 40)
    convolution, state = (
        np.lib.stride_tricks.as_strided(pages[:, at:], (BLOCKS, *shape), (160, 4 * shape[1], 4))
        for at, shape in ((0, (2, 3)), (6, (4, 6)))
    )
    layout = Layout({"0": [Tensor(convolution, pages), Tensor(state, pages)]}, BLOCKS)
    assert layout.shape.block_bytes == 30 * 4
    assert value(layout, 3) == pages[3, :30].tobytes()
    assert "0#0" in layout.text
    assert "0#1" in layout.text


def test_what_cannot_be_stored_is_refused():
    memory = random(BLOCKS + 1, 3, 4, 8)
    with pytest.raises(ConfigError, match="7 blocks are not found"):
        Layout({"0": Tensor(memory)}, BLOCKS)
    with pytest.raises(ConfigError, match="no KV cache"):
        Layout({}, BLOCKS)
