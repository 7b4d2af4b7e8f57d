"""get_into_ranges: fragments of values into fragments of registered buffers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mooncake.client.get import slice_place
from mooncake.errors import ErrorCode, StoreError
from mooncake.transfer.pieces import Pieces

if TYPE_CHECKING:
    from mooncake.client.client import StoreClient

INVALID = int(ErrorCode.INVALID_PARAMS)


def get_ranges(
    client: "StoreClient",
    buffer_ptrs: Sequence[int],
    all_keys: Sequence[Sequence[str]],
    all_dst_offsets: Sequence[Sequence[Sequence[int]]],
    all_src_offsets: Sequence[Sequence[Sequence[int]]],
    all_sizes: Sequence[Sequence[Sequence[int]]],
    results: list[list[list[int]]],
) -> list[list[list[int]]]:
    """Fill `results` (nested as `all_sizes`) with bytes or codes."""
    if not len(buffer_ptrs) == len(all_keys) == len(all_dst_offsets) == len(all_src_offsets) == len(all_sizes):
        return results
    wanted = list(dict.fromkeys(key for keys in all_keys for key in keys))
    if not wanted:
        return results
    try:
        located = client.gets.locate(wanted)
    except StoreError as error:
        return [[[int(error.code)] * len(sizes) for sizes in by_key] for by_key in all_sizes]
    found_by_key = dict(zip(wanted, located.found, strict=True))
    places, targets, where = [], [], []
    for b, (base, keys) in enumerate(zip(buffer_ptrs, all_keys, strict=True)):
        if not len(keys) == len(all_dst_offsets[b]) == len(all_src_offsets[b]) == len(all_sizes[b]):
            continue
        for k, key in enumerate(keys):
            found = found_by_key[key]
            fragments = zip(all_dst_offsets[b][k], all_src_offsets[b][k], all_sizes[b][k], strict=False)
            for f, (to, at, size) in enumerate(fragments):
                if isinstance(found, int):
                    results[b][k][f] = found
                elif size > 0 and at >= 0 and to >= 0 and at + size <= found.size:
                    places.append([slice_place(place, at, size) for place in found.places])
                    targets.append((base + to, size))
                    where.append((b, k, f))
    addresses = np.array([address for address, _ in targets], np.int64)
    lengths = np.array([size for _, size in targets], np.int64)
    if not targets or not client.contains(Pieces(addresses, lengths)):
        client.gets.finish(located)
        return results
    try:
        codes = client.gets.fetch(
            places,
            lambda values: Pieces(addresses[list(values)], lengths[list(values)]),
            located,
            lambda pieces: client.covers(pieces, True),
        )
    finally:
        client.gets.finish(located)
    for (b, k, f), code, (_, size) in zip(where, codes, targets, strict=True):
        results[b][k][f] = code or size
    return results
