"""MooncakeDistributedStore: the names and results of the drop-in API over the store client.

Results are exactly the C++ library's: plain ints and lists, 0 or a negative code of `mooncake.errors.ErrorCode`,
b"" or None for what is not there.  Every call is synchronous, thread-safe and ends within its limit.  Nothing is
done here but checking arguments and shaping results.
"""

from mooncake.store.blocks import Blocks
from mooncake.store.dummy import Dummy
from mooncake.store.queries import Queries
from mooncake.store.replicas import Replicas
from mooncake.store.segments import Segments
from mooncake.store.sessions import Sessions
from mooncake.store.tensors.parallel_gets import ParallelTensorGets
from mooncake.store.tensors.parallel_puts import ParallelTensorPuts


class MooncakeDistributedStore(
    ParallelTensorPuts, ParallelTensorGets, Sessions, Queries, Replicas, Segments, Blocks, Dummy
):
    """A client of a pool of KV-cache memory.  `setup` first; `close` leaves the pool."""
