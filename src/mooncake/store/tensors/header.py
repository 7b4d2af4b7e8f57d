"""What a stored tensor begins with: 304 bytes, little endian, that say what follows (spec: drop-in behaviour 1.7).

    u32 magic | u16 version | u16 header size | i32 dtype | i32 dimensions | u32 layout (0 full, 1 shard) | u32 flags |
    u64 offset of the data | u64 bytes of data | 8 x i64 global shape | 8 x i64 local shape | u32 axes | u32 reserved |
    4 x { i32 kind | i32 index | i32 rank | i32 count | i32 split dimension | i32 expert or stage | i64 local extent }

Unused dimensions are -1.  Nothing here needs torch.
"""

import math
import struct
from typing import NamedTuple

SIZE = 304
MOST_DIMENSIONS = 8
MOST_AXES = 4
_MAGIC = 0x4D4F4F4E
_VERSION = 1
_FULL, _SHARD = 0, 1

_HEADER = struct.Struct("<IHHiiIIQQ8q8qII" + "6iq" * MOST_AXES)

DTYPES = (
    "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool",
    "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
"""torch's names of the element types, by their number in the header."""

ITEM_SIZES = (4, 8, 1, 1, 2, 2, 4, 4, 8, 8, 1, 2, 2, 1, 1)  # bytes


class ShardAxis(NamedTuple):
    """One axis along which the whole was divided, and this shard's rank.  `split_dim` -1: it was not cut; `extent`: of
    the cut dimension, here."""

    kind: int  # see layout.KINDS
    rank: int
    size: int
    split_dim: int
    label: int  # expert or stage
    extent: int


class Header(NamedTuple):
    """`shape` is that of the data that follow, `whole` that of what they are a shard of."""

    dtype: int
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    axes: tuple[ShardAxis, ...] = ()

    @property
    def data_size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    def pack(self) -> bytes:
        padded = [number for i, axis in enumerate(self.axes) for number in (axis.kind, i, *axis[1:])]
        return _HEADER.pack(
            _MAGIC, _VERSION, SIZE, self.dtype, len(self.shape), _SHARD if self.axes else _FULL, 0, SIZE,
            self.data_size, *_pad(self.whole), *_pad(self.shape), len(self.axes), 0,
            *padded, *[0] * (7 * (MOST_AXES - len(self.axes))),
        )  # fmt: skip


def unpack(raw: bytes | memoryview, size: int) -> Header | None:
    """The header at the beginning of a value of `size` bytes; None if that is no tensor."""
    if size < SIZE or len(raw) < SIZE:
        return None
    fields = _HEADER.unpack_from(raw)
    magic, version, header_size, dtype, dimensions, _, _, offset, data_size = fields[:9]
    count = fields[25]
    if (
        (magic, version, header_size, offset) != (_MAGIC, _VERSION, SIZE, SIZE)
        or not 0 <= dtype < len(DTYPES)
        or not 0 <= dimensions <= MOST_DIMENSIONS
        or count > MOST_AXES
    ):
        return None
    shape = fields[17 : 17 + dimensions]
    axes = []
    for i in range(count):
        kind, _, *rest = fields[27 + 7 * i : 34 + 7 * i]
        axes.append(ShardAxis(kind, *rest))
    header = Header(dtype, shape, fields[9 : 9 + dimensions], tuple(axes))
    if min(shape, default=0) < 0 or header.data_size != data_size or SIZE + data_size != size:
        return None
    return header


def _pad(shape: tuple[int, ...]) -> list[int]:
    return [*shape, *[-1] * (MOST_DIMENSIONS - len(shape))]
