"""EngramStore: embedding tables of one layer in the pool, one value a head, read row by row."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mooncake.errors import ErrorCode
from mooncake.store.buffer_pool import member_of

if TYPE_CHECKING:
    from mooncake.store.store import MooncakeDistributedStore

INVALID = int(ErrorCode.INVALID_PARAMS)
NOT_FOUND = int(ErrorCode.OBJECT_NOT_FOUND)
_ITEM = 4  # bytes of a float32


class EngramStoreConfig:
    """`table_vocab_sizes`: rows of each head's table; `embedding_dim`: floats of a row."""

    __slots__ = ("embedding_dim", "table_vocab_sizes")

    def __init__(self) -> None:
        self.table_vocab_sizes: list[int] = [1024]
        self.embedding_dim = 64


class EngramStore:
    """The tables of layer `layer_id`, of float32.  Raises ValueError for a size that is not positive, RuntimeError for
    what is no store."""

    def __init__(self, layer_id: int, config: EngramStoreConfig, store: Any = None) -> None:
        sizes = [int(size) for size in config.table_vocab_sizes]
        if not all(size > 0 for size in sizes):
            raise ValueError("EngramStoreConfig.table_vocab_sizes must contain only positive values")
        if config.embedding_dim <= 0:
            raise ValueError("EngramStoreConfig.embedding_dim must be positive")
        self._layer = int(layer_id)
        self._sizes = sizes
        self._dim = int(config.embedding_dim)
        self._store: MooncakeDistributedStore | None = None if store is None else member_of(store, "EngramStore")

    def get_store_keys(self) -> list[str]:
        """The keys of the tables, one a head."""
        return [f"engram:l{self._layer}:h{head}" for head in range(len(self._sizes))]

    def get_num_heads(self) -> int:
        return len(self._sizes)

    def get_embedding_dim(self) -> int:
        return self._dim

    def get_table_vocab_sizes(self) -> list[int]:
        return list(self._sizes)

    def populate(self, embedding_buffers: list[Any]) -> None:
        """Put the tables, an array [rows, floats] a head.  Raises RuntimeError for other shapes, and if they cannot be
        put or are there already: tables do not change."""
        if len(embedding_buffers) != len(self._sizes):
            raise RuntimeError("embedding_buffers size must match num_heads")
        tables = [self._table(*pair) for pair in zip(embedding_buffers, self._sizes, strict=True)]
        keys, store = self.get_store_keys(), self._store
        if store is None or any(store.batch_is_exist(keys)):
            raise RuntimeError("populate failed: there is no store, or the tables are in it already")
        codes = store.batch_put_from(keys, [t.ctypes.data for t in tables], [t.nbytes for t in tables])
        if any(codes):
            store.batch_remove([key for key, code in zip(keys, codes, strict=True) if not code], True)
            raise RuntimeError(f"populate failed: the tables could not be put (codes {codes})")

    def lookup(self, row_ids: Any) -> npt.NDArray[np.float32]:
        """Rows by number: of [batch, length, head] the floats, as [batch, length, head, floats].  Raises RuntimeError
        for other shapes, rows that there are none of, and tables that are not there."""
        ids = self._ids(row_ids)
        rows = np.empty((*ids.shape, self._dim), np.float32)
        if not ids.size or (ids < 0).any() or (ids >= np.array(self._sizes)).any():
            raise RuntimeError("EngramStore lookup failed: no rows, or a row that its table does not have")
        size = self._dim * _ITEM
        by_head = [ids[..., head].ravel().tolist() for head in range(len(self._sizes))]
        offsets = [[row * size for row in rows_of_head] for rows_of_head in by_head]
        places = np.arange(rows.size // self._dim).reshape(ids.shape) * size
        targets = [places[..., head].ravel().tolist() for head in range(len(self._sizes))]
        sizes = [[size] * len(of_head) for of_head in offsets]
        if not self._read(rows, offsets, targets, sizes):
            raise RuntimeError("EngramStore lookup failed: the tables are not there")
        return rows

    def remove_from_store(self, force: bool = False) -> int:
        """Remove the tables; how many there were.  Raises RuntimeError if one is leased and not `force`."""
        if self._store is None:
            raise RuntimeError(f"remove_from_store failed, rc={INVALID}")
        codes = self._store.batch_remove(self.get_store_keys(), force)
        failed = [code for code in codes if code not in (0, NOT_FOUND)]
        if failed:
            raise RuntimeError(f"remove_from_store failed, rc={failed[0]}")
        return codes.count(0)

    # -- inside

    def _table(self, given: Any, rows: int) -> npt.NDArray[np.float32]:
        if not isinstance(given, np.ndarray):
            raise RuntimeError("embedding_buffers must be NumPy arrays")
        if given.ndim != 2:
            raise RuntimeError("each embedding buffer must be 2D [N_h, D]")
        if given.shape != (rows, self._dim):
            raise RuntimeError(
                f"embedding buffer shape {given.shape} does not match get_table_vocab_sizes()/get_embedding_dim() "
                f"{(rows, self._dim)}"
            )
        return np.ascontiguousarray(given, np.float32)

    def _ids(self, given: Any) -> npt.NDArray[np.int64]:
        if not isinstance(given, np.ndarray):
            given = list(given)
            if not given:
                raise RuntimeError("row_ids must not be empty")
        ids = np.asarray(given).astype(np.int64)
        if ids.ndim != 3:
            raise RuntimeError("row_ids array must have shape [B, L, H]")
        if ids.shape[2] != len(self._sizes):
            raise RuntimeError("row_ids last dimension must match num_heads")
        return ids

    def _read(
        self,
        rows: npt.NDArray[np.float32],
        offsets: list[list[int]],
        targets: list[list[int]],
        sizes: list[list[int]],
    ) -> bool:
        store, keys = self._store, self.get_store_keys()
        if store is None or any(store.batch_get_session_start(keys)):
            return False
        try:
            base = rows.ctypes.data
            addresses = [[base + at for at in of_head] for of_head in targets]
            got = store.batch_get_into_multi_buffer_ranges(keys, addresses, sizes, offsets)
        finally:
            store.batch_get_session_end(keys)
        return got == [sum(of_head) for of_head in sizes]
