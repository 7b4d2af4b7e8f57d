"""EngramStore: tables, rows, and what is refused."""

import numpy as np
import pytest

from mooncake.store import EngramStore, EngramStoreConfig, MooncakeDistributedStore

TABLES = [np.arange(20, dtype=np.float32).reshape(4, 5), np.arange(100, 115, dtype=np.float32).reshape(3, 5)]


def config(sizes=(4, 3), dim=5) -> EngramStoreConfig:
    made = EngramStoreConfig()
    made.table_vocab_sizes, made.embedding_dim = list(sizes), dim
    return made


def test_rows(store):
    engram = EngramStore(1, config(), store)
    assert engram.get_store_keys() == ["engram:l1:h0", "engram:l1:h1"]
    assert (engram.get_num_heads(), engram.get_embedding_dim(), engram.get_table_vocab_sizes()) == (2, 5, [4, 3])
    with pytest.raises(RuntimeError, match="lookup failed"):
        engram.lookup(np.array([[[0, 1]]]))
    engram.populate([table.astype(np.float64) for table in TABLES])
    assert store.get("engram:l1:h1") == TABLES[1].tobytes()
    with pytest.raises(RuntimeError, match="populate failed"):
        engram.populate(TABLES)
    rng = np.random.default_rng(0)
    ids = np.stack([rng.integers(0, 4, (3, 7)), rng.integers(0, 3, (3, 7))], axis=-1)
    rows = engram.lookup(ids)
    assert (rows.shape, rows.dtype) == ((3, 7, 2, 5), np.float32)
    for head in range(2):
        assert (rows[:, :, head] == TABLES[head][ids[:, :, head]]).all()
    for same in ([[[0, 1]]], np.array([[[0.0, 1.0]]]), np.array([[[0, 1]]], np.int32)):
        assert engram.lookup(same).tolist() == [[[TABLES[0][0].tolist(), TABLES[1][1].tolist()]]]
    assert store.is_exist("engram:l1:h0") == 1
    with pytest.raises(RuntimeError, match="rc=-706"):
        engram.remove_from_store()
    assert engram.remove_from_store(True) > 0
    assert engram.remove_from_store(True) == 0
    assert store.batch_is_exist(engram.get_store_keys()) == [0, 0]


def test_what_is_refused(store):
    for sizes, dim in (((0, 1), 5), ((-1,), 5), ((4,), 0), ((4,), -1)):
        with pytest.raises(ValueError, match="positive"):
            EngramStore(1, config(sizes, dim), store)
    for bad in (5, MooncakeDistributedStore()):
        with pytest.raises(RuntimeError):
            EngramStore(1, config(), bad)
    with pytest.raises(AttributeError):
        config().other = 1
    engram = EngramStore(-1, config(), store)
    assert engram.get_store_keys() == ["engram:l-1:h0", "engram:l-1:h1"]
    for buffers in (TABLES[:1], [TABLES[0]] * 2, [table.ravel() for table in TABLES], [b"bytes"] * 2):
        with pytest.raises(RuntimeError):
            engram.populate(buffers)
    assert store.batch_is_exist(engram.get_store_keys()) == [0, 0]
    engram.populate(TABLES)
    for ids in (
        np.array([0, 1]), np.array([[0, 1]]), np.array([[[4, 0]]]), np.array([[[-1, 0]]]), np.array([[[0, 1, 2]]]),
        np.zeros((0, 0, 2), np.int64), [],
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            engram.lookup(ids)
    with pytest.raises(TypeError):
        engram.lookup(5)


def test_without_a_store():
    engram = EngramStore(1, config())
    with pytest.raises(RuntimeError, match="populate failed"):
        engram.populate(TABLES)
    with pytest.raises(RuntimeError, match="lookup failed"):
        engram.lookup(np.array([[[0, 1]]]))
    with pytest.raises(RuntimeError, match="rc=-600"):
        engram.remove_from_store()
